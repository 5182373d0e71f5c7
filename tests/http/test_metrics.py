"""What Prometheus and the log get to see, and what they never do."""

import asyncio
import sys

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from support.proxy import token
from swarmq.messages import Event
from swarmq.runtime import logs

from .test_control import call

HI = {"role": "user", "content": "hi"}


async def scrape(stage, *, role="read"):
    headers = {"authorization": f"Bearer {token(role)}"}
    async with stage.http.get(f"{stage.url}/metrics", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["content-type"].startswith("text/plain")
        text = await response.text()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_calls_tokens_engines_and_durations(stages):
    async with stages(engines=2, kinds={"math": {}, "code": {}}) as stage:
        for engine in stage.engines:
            engine.version = 3
            engine.say("hello")
            engine.say("hello")
            engine.say("hello")
        await stage.ask(HI, key=stage.key("e1", kind="math"))
        await stage.ask(HI, key=stage.key("e2", kind="code"))
        await stage.ask(HI, key=stage.key("e3", kind="made up"))
        await stage.refused({"model": "no", "messages": [HI]})
        async with asyncio.timeout(120):
            while (found := await scrape(stage)).get(("swarmq_engine_weight_version", "main", "scripted://0")) != 3:
                pass
    for kind in ("math", "code", ""):
        assert [found[f"swarmq_{name}_total", kind] for name in ("calls", "episodes", "turns", "sampled_tokens")] == [
            1,
            1,
            1,
            4,
        ]
    assert found["swarmq_errors_total",] == 1
    assert found["swarmq_open_calls",] == 0
    assert found["swarmq_engine_up", "main", "scripted://1"] == 1
    for name in ("first_token", "call", "confirm"):
        assert found[f"swarmq_{name}_seconds_count", "main"] == 3


async def test_metrics_have_what_the_collector_counts_of_answers_that_nobody_received(stage):
    fields = {"orphan_turns": 3, "unseen_turns": 1, "rewards_uncredited": 2}
    stage.episodes.handle_event(Event(run="r", source="collector", name="state", at=0.0, fields=fields))
    found = await scrape(stage)
    assert {name: found[f"swarmq_{name}_total",] for name in fields} == fields


async def test_metrics_need_a_token(stage):
    async with stage.http.get(f"{stage.url}/metrics") as response:
        assert response.status == 401


@pytest.fixture
def as_a_daemon(monkeypatch):
    """Sets the log up as a daemon does."""

    def configure(*, terminal):
        for name, module in list(sys.modules.items()):
            if name.startswith("swarmq.proxy.") and hasattr(module, "log"):
                monkeypatch.setattr(module, "log", structlog.get_logger())  # an earlier test's may be kept
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        logs.configure(role="proxy", run="r")

    yield configure
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


@pytest.mark.parametrize("terminal", [False, True])
async def test_nothing_secret_is_logged(stage, capsys, as_a_daemon, terminal):
    """Every way to be refused, a failure in the middle, and one of ours with its traceback."""
    as_a_daemon(terminal=terminal)
    secrets = [
        stage.key(),
        stage.key(expires_in=-100),
        stage.key(root=b"x" * 32),
        token("read"),
        "sk-someone-elses-key",
    ]
    for secret in secrets:
        await stage.post({"model": "main", "messages": []}, key=secret)
        await call(stage, "POST", "/episodes", {"task_id": "t"}, as_=secret)

    stage.engine.say("abcd", error="it broke")
    await stage.stream(HI, key=secrets[0])

    async def broken(*_):
        raise RuntimeError("a bug")

    stage.engine.render = broken
    status, _ = await stage.refused({"model": "main", "messages": [HI]}, key=secrets[0])
    assert status == 500
    told = "".join(capsys.readouterr())
    for event in ("stream_failed", "call_failed", "Traceback", "a bug"):
        assert event in told, "nothing was logged, so nothing is shown"
    for secret in secrets:
        assert secret not in told
        assert secret.rpartition(".")[2] not in told
