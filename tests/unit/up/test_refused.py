"""What cannot be trained from is refused before anything is started."""

import asyncio
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from support.tiny_model import tiny_model
from swarmq.config import BrokerSettings, EngineSettings, Lora, Loss, Policy, SwarmJob, Train
from swarmq.engine.server.gpus import GpuCapacity
from swarmq.errors import BrokerError, ConfigError, SetUpError, SwarmqError
from swarmq.learner.checkpoint.discovery import MANIFEST, File, Manifest
from swarmq.learner.store.records import ADAPTER_FILE, ADAPTER_SETTINGS_KEY, SCHEMA, RunIdentity
from swarmq.up import deploy
from swarmq.up.job_checks import check_settings

ELSEWHERE = EngineSettings(urls=("http://127.0.0.1:9",))


def refused(job: SwarmJob) -> SwarmqError:
    """What `up` says of it."""

    async def up() -> None:
        async with deploy(job, report=pytest.fail):
            pass

    with pytest.raises(SwarmqError) as caught:
        asyncio.run(up())
    return caught.value


def training(folder: Path, **settings: object) -> SwarmJob:
    policy = Policy(model="m", engine=ELSEWHERE, train=Train(**settings))
    return SwarmJob(run="r", folder=str(folder), policies={"main": policy})


def test_an_engine_that_would_not_report_what_it_samples(tmp_path: Path) -> None:
    engine = EngineSettings(arguments=("--max-num-seqs", "8", "--logprobs_mode", "raw_logprobs"))
    job = SwarmJob(run="r", folder=str(tmp_path / "run"), policies={"main": Policy(model="m", engine=engine)})
    error = refused(job)
    assert isinstance(error, ConfigError)
    assert "--logprobs_mode would" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "capability", "words"),
    [
        ({"quantization": "fp8"}, 8.0, "quantization = 'fp8', but GPU 1 has compute capability 8, and FP8 needs 8.9"),
        ({"kv_cache_dtype": "fp8"}, 8.6, "kv_cache_dtype = 'fp8', but GPU 1 has compute capability 8.6"),
        ({"kv_cache_dtype": "fp8"}, None, "kv_cache_dtype = 'fp8', but this host has no GPU"),
    ],
)
def test_fp8_is_refused_on_a_host_without_it(
    settings: dict[str, Any], capability: float | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmq.up.job_checks.is_cuda_build", lambda: True)
    job = SwarmJob(run="r", policies={"main": Policy(model="m", engine=EngineSettings(**settings))})

    def find(*capabilities: float) -> list[GpuCapacity]:
        return [GpuCapacity(total=80 << 30, free=80 << 30, compute_capability=each) for each in capabilities]

    with pytest.raises(ConfigError) as caught:
        check_settings(job, find_gpus=lambda: find(9.0, capability) if capability else [])
    assert f"policies.main.engine.{words}" in str(caught.value)
    assert len(check_settings(job, find_gpus=lambda: find(9.0, 8.9))) == 2


def test_a_learner_with_fp8_is_refused_on_a_host_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmq.up.job_checks.is_cuda_build", lambda: True)
    job = SwarmJob(run="r", policies={"main": Policy(model="m", train=Train(mixed_precision="fp8"))})
    old, new = (
        [GpuCapacity(total=80 << 30, free=80 << 30, compute_capability=capability)] for capability in (8.0, 8.9)
    )
    with pytest.raises(SetUpError, match=r"train\.mixed_precision is 'fp8', and this host has no GPU with FP8"):
        check_settings(job, find_gpus=lambda: old)
    assert check_settings(job, find_gpus=lambda: new) == new


def test_a_disk_on_which_its_rabbitmq_would_take_no_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARMQ_AMQP_URL", raising=False)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))
    job = training(tmp_path / "runs" / "new")
    error = refused(job)
    assert isinstance(error, BrokerError)
    assert "GB free, and RabbitMQ accepts no messages below " in str(error)
    assert "set `folder` to another disk" in str(error)
    assert list(tmp_path.iterdir()) == [], "no folder of a run that never was"
    job.run_folder.path.mkdir(parents=True)
    refused(job)
    assert list(job.run_folder.path.iterdir()) == [], "the user made this folder"


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        (
            {"url": "amqp://u:secret@a/,amqp://u:secret@b/", "nodes": 3},
            "broker.nodes is 3, but the RabbitMQ at a:5672, b:5672",
        ),
        ({"url": "amqp://u:secret@a/,amqp://other:secret@b/"}, "lists a:5672 and b:5672 with another user"),
    ],
)
def test_a_broker_that_cannot_be_meant(tmp_path: Path, broker: dict[str, Any], words: str) -> None:
    job = msgspec.structs.replace(training(tmp_path / "runs"), broker=BrokerSettings(**broker))
    error = refused(job)
    assert words in str(error)
    assert "secret" not in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_whose_package_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("swanlab")
    error = refused(training(tmp_path / "runs", trackers=("swanlab",)))
    assert "policies.main.train.trackers: not installed: swanlab" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_routing_that_cannot_be_replayed(tmp_path: Path) -> None:
    policy = Policy(model=str(tiny_model()), engine=ELSEWHERE, train=Train(routing_replay=True))
    error = refused(SwarmJob(run="r", folder=str(tmp_path / "runs"), policies={"main": policy}))
    assert "policies.main.train.routing_replay: the routing of a model of type 'qwen3' cannot be replayed" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_are_to_share_passes_and_are_not_there(tmp_path: Path) -> None:
    error = refused(training(tmp_path / "runs", context_parallel=2))
    assert "policies.main.train.context_parallel: 2 ranks share each pass, but the learner has 1 rank: " in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_of_ranks_that_is_not_installed(tmp_path: Path) -> None:
    """How many ranks a launcher starts is not known here, so no setting that needs several is refused."""
    error = refused(training(tmp_path / "runs", launcher=("no-such-launcher", "-n2"), context_parallel=2))
    assert "policies.main.train.launcher: 'no-such-launcher' is not found on this host" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_one_rank_that_is_to_offload(tmp_path: Path) -> None:
    error = refused(training(tmp_path / "runs", sharding="full", cpu_offload=True))
    assert "policies.main.train.cpu_offload: a single rank" in str(error)


def checkpoint(job: SwarmJob, lora: Lora) -> Path:
    """As far as it is looked at: its weights are no model's."""
    path = job.run_folder.checkpoints("main") / "step-00000007"
    (path / ADAPTER_FILE).parent.mkdir(parents=True)
    settings = {ADAPTER_SETTINGS_KEY: msgspec.json.encode(lora).decode()}
    save_file({"a": np.zeros(1, np.float32)}, path / ADAPTER_FILE, metadata=settings)
    manifest = Manifest(
        schema=SCHEMA,
        identity=RunIdentity.of(job, "main"),
        version=7,
        files={str(ADAPTER_FILE): File(size=(path / ADAPTER_FILE).stat().st_size, sha256="of no importance")},
        written_at=0.0,
        swarmq="0",
    )
    (path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return path


@pytest.mark.parametrize("lora", [None, Lora(rank=8)])
def test_adapters_other_than_those_of_the_runs_checkpoint(tmp_path: Path, lora: Lora | None) -> None:
    path = checkpoint(job := training(tmp_path, lora=lora), Lora(rank=4))
    error = refused(job)
    assert isinstance(error, SetUpError)
    assert str(error).startswith(f"{path} was trained with train.lora = {{rank = 4, alpha = 32}}, not with ")


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    checkpoint(job := training(tmp_path), Lora())
    other = msgspec.structs.replace(job.policies["main"], model="n")
    error = refused(msgspec.structs.replace(job, policies={"main": other}))
    assert "is of another run, policy or model: model is 'm' there and 'n' here" in str(error)


@pytest.mark.parametrize(
    ("role", "loss"), [("teacher", {"loss": Loss(name="distill")}), ("reference", {"loss": Loss(kl=0.1)})]
)
def test_a_judge_with_another_tokenizer(tmp_path: Path, role: str, loss: dict[str, Loss]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tiny_model() / name).read_text().replace(json.dumps("<|im_start|>"), json.dumps("<|turn|>"))
        (other / name).write_text(text)
    train = Train(**loss, **{role: str(other)})
    policy = Policy(model=str(tiny_model()), engine=ELSEWHERE, train=train)
    error = refused(SwarmJob(run="r", folder=str(tmp_path / "runs"), policies={"main": policy}))
    assert f"policies.main.train.{role}: {other} has another tokenizer than {tiny_model()}" in str(error)
    assert not (tmp_path / "runs").exists()
