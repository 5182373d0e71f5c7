"""Engines of a run that is up, added and removed by hand."""

import msgspec
import pytest

from swarmq.config import SwarmJob
from swarmq.engine.server.membership import (
    _with_whole_gpus,
    add_engine,
    find_unprotected_engines,
    list_engines,
    remove_engine,
)
from swarmq.errors import ConfigError, EngineError
from swarmq.registries.engines import EngineRegistry
from swarmq.weights.push.engine_control import EngineControl


@pytest.fixture
def job(tmp_path, vllm):
    engine = {"urls": [vllm.url]}
    return SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "m", "engine": engine}}})


async def test_an_engine_that_answers_is_added_and_listed_and_one_that_does_not_changes_nothing(job, vllm):
    dead = "http://127.0.0.1:9"
    with pytest.raises(EngineError, match="cannot be reached"):
        await add_engine(EngineRegistry(job), "main", dead)
    for text in ("localhost", "ftp://localhost:8000", "http://localhost:99999", ""):
        with pytest.raises(EngineError, match=f"engine '{text}': not a vLLM address like http://127"):
            await add_engine(EngineRegistry(job), "main", text)
    assert EngineRegistry(job).urls() == {"main": (vllm.url,)}
    vllm.label = "7"
    [seen] = await list_engines(EngineRegistry(job))
    assert (seen.policy, seen.url, seen.weights, seen.state) == (
        "main",
        vllm.url,
        "7",
        "serves, accepts callers without the secret",
    )
    EngineRegistry(job).add("main", dead)
    assert (await list_engines(EngineRegistry(job)))[1].state == (
        f"the engine at {dead} cannot be reached: nothing answers there (Connection refused); is vLLM running, and is the url right?"
    )


async def test_an_engine_of_another_version_is_not_added(job, vllm):
    vllm.version = "0.40.0"
    with pytest.raises(EngineError, match=f"{vllm.url} runs vLLM 0.40.0"):
        await add_engine(EngineRegistry(job), "main", vllm.url)
    assert EngineRegistry(job).urls() == {"main": (vllm.url,)}


async def test_an_engine_with_another_tokenizer_is_not_added(job, vllm, another):
    another.tokens = [5, 6, 8]
    with pytest.raises(
        EngineError, match=rf"{another.url} has another tokenizer than the one at {vllm.url}: .*token 2 on"
    ):
        await add_engine(EngineRegistry(job), "main", another.url)
    assert EngineRegistry(job).urls() == {"main": (vllm.url,)}


def served(**facts):
    shape = {"hidden_size": "64", "num_hidden_layers": "2"}
    return [{"gpu": "", "dtype": "float32", "pid": 7, "swarmq": "1.0", "shape": shape} | facts]


@pytest.mark.parametrize(
    ("version", "facts", "why"),
    [
        ("0.33.1", {}, "has vllm 0.33.1, the one at {old} vllm 0.32.0: install the same version"),
        ("0.32.0", {"swarmq": "0.9"}, "has swarmq 0.9, the one at {old} swarmq 1.0: install the same version"),
        (
            "0.32.0",
            {"shape": {"hidden_size": "64", "num_hidden_layers": "3"}},
            "serves another model than the one at {old}: num_hidden_layers in its config.json is 3, not 2",
        ),
    ],
)
async def test_an_engine_of_another_version_than_the_others_or_with_another_model_is_not_added(
    job, vllm, another, version, facts, why
):
    vllm.workers, another.workers, another.version = served(), served(**facts), version
    with pytest.raises(EngineError, match=f"the engine at {another.url} {why.format(old=vllm.url)}"):
        await add_engine(EngineRegistry(job), "main", another.url)
    assert EngineRegistry(job).urls() == {"main": (vllm.url,)}


async def test_a_build_for_another_device_is_the_same_version(job, vllm, another):
    another.version = f"{vllm.version}+cpu"
    await add_engine(EngineRegistry(job), "main", another.url)
    assert EngineRegistry(job).urls() == {"main": (vllm.url, another.url)}


@pytest.mark.parametrize("silent", ["new", "old", "neither"])
async def test_an_engine_is_added_that_has_the_same_tokenizer_or_cannot_be_compared(job, vllm, another, silent):
    if silent != "neither":
        another.tokens = [0]
        (another if silent == "new" else vllm).missing.add("/tokenize")
    await add_engine(EngineRegistry(job), "main", another.url)
    assert EngineRegistry(job).urls() == {"main": (vllm.url, another.url)}


async def test_the_only_engine_stays_and_an_unknown_one_is_named(job, vllm):
    with pytest.raises(ConfigError, match="is the only engine of main: add another one first"):
        remove_engine(EngineRegistry(job), "main", vllm.url)
    with pytest.raises(ConfigError, match=f"does not serve main: its engines are {vllm.url}"):
        remove_engine(EngineRegistry(job), "main", "http://127.0.0.1:1")
    await add_engine(EngineRegistry(job), "main", vllm.url + "/")
    assert EngineRegistry(job).urls() == {"main": (vllm.url,)}, "it was there already"
    EngineRegistry(job).add("main", "http://127.0.0.1:1")
    remove_engine(EngineRegistry(job), "main", f"{vllm.url}/")
    assert EngineRegistry(job).urls() == {"main": ("http://127.0.0.1:1",)}


async def test_an_engine_is_asked_how_much_is_open_there(vllm):
    vllm.metrics = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0\n'
    )
    async with EngineControl(vllm.url) as engine:
        assert await engine.count_open_requests() == 4


async def test_an_engine_that_asks_for_the_run_s_secret_is_no_cause_to_warn_and_an_open_one_is(job, vllm, another):
    vllm.secret = EngineRegistry(job).secret()
    assert await add_engine(EngineRegistry(job), "main", vllm.url) == ""
    assert (await list_engines(EngineRegistry(job)))[0].state == "serves"
    assert "--middleware swarmq.weights.vllm_plugin.middleware.SecretMiddleware" in await add_engine(
        EngineRegistry(job), "main", another.url
    )
    assert len(await find_unprotected_engines([vllm.url, another.url, "http://127.0.0.1:9"], vllm.secret)) == 1


async def test_an_engine_of_another_secret_is_not_added(job, vllm, another):
    another.secret = "of another run"
    with pytest.raises(EngineError, match=f"{another.url} requires another secret than this run's"):
        await add_engine(EngineRegistry(job), "main", another.url)


def test_runs_may_share_engines_by_a_secret_of_the_user_s(job, monkeypatch):
    own = EngineRegistry(job).secret()
    assert own == EngineRegistry(job).secret()
    monkeypatch.setenv("SWARMQ_ENGINE_SECRET", "shared")
    assert EngineRegistry(job).secret() == "shared" != own


def test_an_engine_of_another_host_takes_the_whole_gpu_unless_the_job_sets_a_share(job):
    policy = job.policies["main"]
    assert _with_whole_gpus(policy).engine.gpu_memory_utilization == 0.9
    engine = msgspec.structs.replace(policy.engine, gpu_memory_utilization=0.3)
    assert _with_whole_gpus(msgspec.structs.replace(policy, engine=engine)).engine == engine
