"""How a server is started follows from the settings, the model and the machine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path, PosixPath

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from swarmq.config import EngineSettings, Policy
from swarmq.engine.client.versions import check_installed_version
from swarmq.engine.server import launch
from swarmq.engine.server.gpus import GpuCapacity
from swarmq.engine.server.launch import EngineProcess, build_command, build_environment, choose_cpu_cache_gib
from swarmq.engine.server.model_check import ModelFacts
from swarmq.errors import ConfigError, EngineError
from swarmq.hosts.addresses import TlsFiles
from swarmq.runtime.processes import find_free_port
from swarmq.weights.vllm_plugin.plugin import START

SMALL = ModelFacts(name="m", architecture="A", hidden_size=256, is_folder=True, tool_call_parser="hermes")
LARGE = msgspec.structs.replace(SMALL, hidden_size=4096, is_folder=False, tool_call_parser=None)


@pytest.mark.parametrize(("limit", "served"), [(None, "2048"), (512, "512"), (4096, "2048")])
def test_a_model_made_for_fewer_tokens_is_served_with_its_own_limit(limit, served):
    model = msgspec.structs.replace(SMALL, max_length=limit)
    words = build_command(
        Policy(model="m", engine=EngineSettings(max_model_len=2048)), model, port=81, cuda=False, cores=2
    )
    assert words[words.index("--max-model-len") + 1] == served


def test_on_another_address_it_can_serve_https():
    tls = TlsFiles(certificate="cert.pem", key="key.pem")
    words = build_command(Policy(model="m"), SMALL, host="gpu2", port=81, tls=tls, cuda=False, cores=2)
    for option, value in (("--host", "gpu2"), ("--ssl-certfile", "cert.pem"), ("--ssl-keyfile", "key.pem")):
        assert words[words.index(option) + 1] == value
    engine = EngineProcess(Policy(model="m"), host="gpu2", port=81, tls=tls, log_path=Path("engine.log"))
    assert engine.url == "https://gpu2:81"


def test_the_server_reports_what_it_sampled_and_listens_to_this_host_alone():
    words = build_command(Policy(model="m"), SMALL, port=81, cuda=False, cores=2)
    for option, value in (
        ("--host", "127.0.0.1"),
        ("--port", "81"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        ("--generation-config", "vllm"),
        ("--middleware", "swarmq.weights.vllm_plugin.middleware.SecretMiddleware"),
        ("--tool-call-parser", "hermes"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--enable-scale-out" in words


@pytest.mark.parametrize(
    ("settings", "option", "value"),
    [
        ({"quantization": "fp8"}, "--quantization", "fp8_per_channel"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype", "fp8"),
        ({"speculation": "ngram"}, "--speculative-config", '{"method": "ngram_gpu", '),
    ],
)
def test_fp8_and_drafts_are_used_when_they_are_set_and_not_before(settings, option, value):
    for chosen, expected in (({}, False), (settings, True)):
        policy = Policy(model="m", engine=EngineSettings(**chosen))
        words = build_command(policy, SMALL, port=81, cuda=True, cores=2)
        assert (option in words) == expected
    assert words[words.index(option) + 1].startswith(value)


@pytest.mark.parametrize("arguments", [("--data-parallel-size", "2"), ("--data_parallel_size=2",), ("-dp", "2")])
def test_replicas_in_one_server_do_not_go_with_drafts(arguments):
    policy = Policy(model="m", engine=EngineSettings(arguments=arguments))
    assert arguments[0] in build_command(policy, SMALL, port=81, cuda=True, cores=2)
    drafting = msgspec.structs.replace(policy, engine=EngineSettings(arguments=arguments, speculation="ngram"))
    with pytest.raises(ConfigError, match=r"-d.* does not go with engine\.speculation .* engine\.count"):
        build_command(drafting, SMALL, port=81, cuda=True, cores=2)


def test_a_cpu_computes_in_float32_and_a_gpu_as_the_model_says():
    policy = Policy(model="m")
    cpu, gpu = (build_command(policy, SMALL, port=81, cuda=cuda, cores=16) for cuda in (False, True))
    assert cpu[cpu.index("--dtype") + 1] == "float32"
    assert gpu[gpu.index("--dtype") + 1] == "auto"
    assert "--enforce-eager" not in gpu


@pytest.mark.parametrize(("cores", "servers"), [(1, "1"), (2, "1"), (8, "4"), (16, "8"), (128, "8")])
def test_callers_of_a_gpu_are_served_by_several_processes_where_there_are_cores(cores, servers):
    words = build_command(Policy(model="m"), SMALL, port=81, cuda=True, cores=cores)
    assert words[:5] == ["-m", START, "vllm.entrypoints.cli.main", "serve", "m"]
    assert words[words.index("--api-server-count") + 1] == servers


def test_arguments_of_the_user_come_last():
    thinking = msgspec.structs.replace(SMALL, reasoning_parser="qwen3")
    words = build_command(Policy(model="m"), thinking, port=81, cuda=False, cores=2)
    assert words[words.index("--reasoning-parser") + 1] == "qwen3"
    policy = Policy(model="m", engine=EngineSettings(arguments=("--tool-call-parser", "other")))
    assert build_command(policy, SMALL, port=81, cuda=False, cores=2)[-2:] == ["--tool-call-parser", "other"]


@pytest.mark.parametrize(
    "given",
    [
        ("--logprobs-mode=raw_logprobs",),
        ("--logprobs_mode", "raw_logprobs"),
        ("--logprobs_mode=raw_logprobs",),
        ("--logprobs-m", "raw_logits"),
        ("--generation_config", "auto"),
        ("--override-generation-config.top_k", "20"),
    ],
)
def test_an_engine_that_would_report_otherwise_than_it_samples_is_refused_at_start(given):
    wrong = rf"policies\.\*\.engine\.arguments of m: {given[0]} would .*: remove it"
    with pytest.raises(ConfigError, match=wrong):
        build_command(Policy(model="m", engine=EngineSettings(arguments=given)), SMALL, port=81, cuda=False, cores=2)
    served = Policy(model="m", trained=False, engine=EngineSettings(arguments=given))
    assert build_command(served, SMALL, port=81, cuda=False, cores=2)[-len(given) :] == [*given], (
        "nothing is learned there"
    )


@pytest.mark.parametrize(
    "given", [("--max-logprobs", "9"), ("--generation-tokens=1",), ("-tp", "2"), ("--", "x_y"), ("", "-")]
)
def test_other_arguments_are_the_users(given):
    policy = Policy(model="m", engine=EngineSettings(arguments=given))
    assert build_command(policy, SMALL, port=81, cuda=False, cores=2)[-len(given) :] == [*given]


def test_prompts_are_computed_in_pieces_and_short_ones_where_a_piece_takes_long_on_a_cpu():
    small, large = (build_command(Policy(model="m"), model, port=81, cuda=False, cores=2) for model in (SMALL, LARGE))
    assert not any("chunked" in word for word in (*small, *large))
    assert "--max-num-batched-tokens" not in small
    assert large[large.index("--max-num-batched-tokens") + 1] == "512"
    assert small[small.index("--long-prefill-token-threshold") + 1] == "256", "other calls get tokens of every step"
    assert "--max-num-batched-tokens" not in build_command(Policy(model="m"), LARGE, port=81, cuda=True, cores=2)


def test_a_model_without_known_tool_calls_gets_no_parser():
    assert "--enable-auto-tool-choice" not in build_command(Policy(model="m"), LARGE, port=81, cuda=False, cores=2)


def test_the_environment_of_the_user_stays_but_weights_can_always_be_controlled():
    changes = build_environment(SMALL, cuda=False, given={"OMP_NUM_THREADS": "7", "VLLM_SERVER_DEV_MODE": "0"})
    assert changes["OMP_NUM_THREADS"] == "7"
    assert changes["VLLM_SERVER_DEV_MODE"] == "1"
    assert changes["VLLM_API_KEY"] == "", "the guard's secret is the only one"


def test_a_small_model_gets_one_thread_and_a_folder_needs_no_hub():
    assert build_environment(SMALL, cuda=False, given={})["OMP_NUM_THREADS"] == "1"
    assert build_environment(SMALL, cuda=False, given={})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in build_environment(LARGE, cuda=True, given={})
    assert "OMP_NUM_THREADS" not in build_environment(LARGE, cuda=True, given={})


def test_the_engine_core_on_one_gpu_does_not_import_everything_again():
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    assert build_environment(LARGE, cuda=True, forks=True, given={})[method] == "fork"
    assert build_environment(LARGE, cuda=True, forks=True, given={method: "spawn"})[method] == "spawn"
    assert method not in build_environment(LARGE, cuda=True, given={}), (
        "workers of several GPUs are spawned, as vLLM does"
    )


@pytest.mark.parametrize(("host_gib", "cache_gib"), [(4, 1), (24, 2), (64, 5), (96, 8), (251, 8), (2048, 8)])
def test_the_cache_on_a_cpu_grows_with_the_host_up_to_what_one_numa_node_has_free(host_gib, cache_gib):
    assert choose_cpu_cache_gib(host_gib << 30) == cache_gib


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0+cpu", "0.33.1rc2"])
def test_supported_vllm_passes(version):
    check_installed_version(version)


@pytest.mark.parametrize("version", ["0.29.2", "0.34.0", "1.0"])
def test_other_vllm_is_refused_with_the_version_to_take(version):
    with pytest.raises(EngineError, match=r"vllm>=0\.30,<0\.34"):
        check_installed_version(version)


async def test_a_missing_model_is_an_error_before_anything_starts(tmp_path):
    engine = EngineProcess(Policy(model=str(tmp_path / "none")), port=1, log_path=tmp_path / "log")
    with pytest.raises(EngineError, match="does not exist"):
        async with engine:
            pass
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("settings", "capabilities", "gpus", "words"),
    [
        ({"quantization": "fp8"}, [9.0, 8.0], None, "quantization = 'fp8', but GPU 1 has compute capability 8"),
        ({"kv_cache_dtype": "fp8"}, [9.0, 8.6], [1], "kv_cache_dtype = 'fp8', but GPU 1 has compute capability 8.6"),
        ({"quantization": "fp8"}, [], None, "quantization = 'fp8', but this host has no GPU"),
        ({"quantization": "fp8"}, [9.0], [1], "quantization = 'fp8', but this host has no GPU for the engine"),
    ],
)
async def test_an_fp8_engine_is_refused_on_every_host_without_fp8(
    settings, capabilities, gpus, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(launch, "is_cuda_build", lambda: True)
    found = [GpuCapacity(total=80 << 30, free=80 << 30, compute_capability=each) for each in capabilities]

    async def start(gpus):
        policy = Policy(model=str(tmp_path / "none"), engine=EngineSettings(**settings))
        log = tmp_path / "log"
        async with EngineProcess(policy, port=1, log_path=log, gpus=gpus, find_gpus=lambda: found):
            pass

    with pytest.raises(ConfigError, match=words):
        await start(gpus)
    if found:
        with pytest.raises(EngineError, match="does not exist"):  # the model, after this check
            await start([0])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["AForCausalLM"]}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / "tokenizer.json").touch()
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    return str(tmp_path)


async def test_a_taken_port_is_named(tmp_path, model):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} .* is taken"):
            async with EngineProcess(Policy(model=model), port=port, log_path=tmp_path / "log"):
                pass


class WithoutRoom(PosixPath):
    """An empty file that takes no byte. (Who reads `/dev/full` reads for ever.)"""

    def open(self, mode, **options):
        return Path("/dev/full" if "a" in mode else "/dev/null").open(mode, **options)


async def test_a_log_without_room_is_no_reason_why_an_engine_does_not_start(model, monkeypatch):
    """This one ends at once, which is said as ever; the line with its command, which nobody could write, is not."""
    monkeypatch.setattr(launch, "is_cuda_build", lambda: False)
    monkeypatch.setattr(launch.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="ended with status 1 while it started"):
        async with EngineProcess(Policy(model=model), port=find_free_port(), log_path=WithoutRoom("/dev/null")):
            pass


CORE = "(EngineCore pid=7) ERROR 11-23 15:27:13 [core.py:1510]"
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 3, in load', "    raise_it()"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            [f"{CORE} {line}" for line in (*TRACEBACK, "a.b.SafetensorError: file not fully covered")]
            + ["(EngineCore pid=7) Process EngineCore:", *TRACEBACK, WRAPPER],
            "a.b.SafetensorError: file not fully covered",
        ),
        (
            [
                *TRACEBACK,
                "a.ValidationError: 1 validation error for ModelConfig",
                "  Value error, no such kind",
                "    More",
            ],
            "a.ValidationError: 1 validation error for ModelConfig Value error, no such kind",
        ),
    ],
)
async def test_an_engine_that_ends_says_the_error_at_the_root_of_it(tmp_path, model, monkeypatch, lines, told):
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\nexit 1\n")
    vllm.chmod(0o700)
    log = tmp_path / "log"
    log.write_text("TypeError: of an earlier start\n")
    monkeypatch.setattr(launch, "is_cuda_build", lambda: False)
    monkeypatch.setattr(launch.sys, "executable", str(vllm))
    with pytest.raises(EngineError) as caught:
        async with EngineProcess(Policy(model=model), port=find_free_port(), log_path=log):
            pass
    assert str(caught.value) == f"vLLM for {model} ended with status 1 while it started: {told}; its log is {log}"


async def test_an_engine_that_names_no_error_is_told_by_the_end_of_its_log(tmp_path, model, monkeypatch):
    monkeypatch.setattr(launch, "is_cuda_build", lambda: False)
    monkeypatch.setattr(launch.sys, "executable", "/bin/false")
    log = tmp_path / "log"
    log.write_text("TypeError: of an earlier start\n")
    with pytest.raises(EngineError, match=rf"while it started; the end of {log}:\n"):
        async with EngineProcess(Policy(model=model), port=find_free_port(), log_path=log):
            pass


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "$ vllm serve\nMPClient: engine core exited unexpectedly; starting cleanup\nTraceback\n",
            "lost its VLLM::EngineCore",
        ),
        ("$ vllm serve\nMPClient: engine core exited unexpectedly\n$ vllm serve\nbye\n", ""),
        ("$ vllm serve\nbye\n", ""),
    ],
)
async def test_a_server_that_ends_by_itself_says_if_it_lost_its_core_since_its_newest_start(log, reason, tmp_path):
    (tmp_path / "log").write_text(log)
    engine = EngineProcess(Policy(model=str(tmp_path / "none")), port=1, log_path=tmp_path / "log")
    engine._process = await asyncio.create_subprocess_exec("true", start_new_session=True)
    assert await engine.wait() == 0
    assert engine.kill_reason.startswith(reason)
    assert bool(engine.kill_reason) == bool(reason)


async def test_a_server_that_was_given_up_and_could_not_be_started_again_is_not_given_up_twice(tmp_path):
    engine = EngineProcess(Policy(model=str(tmp_path / "none")), port=1, log_path=tmp_path / "log")
    engine._process = await asyncio.create_subprocess_exec("true", start_new_session=True)
    engine.kill_reason = "has not answered for 301 s"
    with pytest.raises(EngineError, match="does not exist"):
        await engine.restart()
    await engine.wait()
    assert engine.kill_reason == ""
