"""A run that has ended is told from a RabbitMQ that cannot be reached."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from swarmq import cli, config
from swarmq.broker import amqp
from swarmq.broker.node.files import NodeIdentity
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import BrokerError
from swarmq.observe import monitor
from swarmq.runtime.logs import log
from swarmq.testing import MemoryBroker

PORT = 1
"""Where nobody listens."""


def swarmq(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(one) for one in arguments])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """One that was up with a RabbitMQ of its own."""
    monkeypatch.setattr(amqp.AmqpBroker, "open", refuse)
    broker = {"url": f"amqp://u:p@127.0.0.1:{PORT}/"}
    job = SwarmJob.build(
        {"run": "math", "folder": str(tmp_path), "policies": {"main": {"model": "m"}}, "broker": broker}
    )
    folder = job.run_folder
    folder.broker.mkdir(parents=True)
    folder.resolved.write_text(job.to_toml())
    node = NodeIdentity(node="n", user="u", password="p", amqp_port=PORT, management_port=2, dist_port=3, epmd_port=4)
    (folder.broker / "node.json").write_bytes(msgspec.json.encode(node))
    folder.lock.write_text("17")
    return folder


def refuse(*_: object, **__: object) -> None:
    raise BrokerError("cannot be reached")


@pytest.mark.parametrize("command", ["status", "watch", "inspect", "stop"])
def test_a_run_that_starts_for_the_first_time_is_said_to_be_starting(command: str, run: RunFolder) -> None:
    run.resolved.unlink()
    with run.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = swarmq(command, run.path)
        assert (
            told.output == f"swarmq: {run.path}: the run is starting; `swarmq up` prints how to join it when it is up\n"
        )
        assert swarmq("runs", run.path.parent).output.splitlines()[1].split()[:2] == ["math", "starting"]
    assert "not the folder of a run that was up" in swarmq(command, run.path).output
    assert "no runs in" in swarmq("runs", run.path.parent).output


@pytest.mark.parametrize("command", [("status",), ("watch",), ("pause",), ("stop",), ("stop", "--after", 3)])
def test_a_run_that_is_not_up_is_said_to_be_so(command: tuple[object, ...], run: RunFolder) -> None:
    name, *rest = command
    told = swarmq(name, run.path, *rest)
    assert told.output == (
        f"swarmq: run 'math' is not up, and neither is its RabbitMQ; to continue the run: `swarmq up {run.job}`\n"
    )


def test_the_private_cluster_of_a_run_that_is_not_up_is_known_by_any_of_its_nodes(run: RunFolder) -> None:
    (run.broker / "node1").mkdir()
    (run.broker / "node.json").rename(run.broker / "node1" / "node.json")
    text = run.resolved.read_text()
    run.resolved.write_text(text.replace("amqp://u:p@", "amqp://u:p@127.0.0.1:9/,amqp://u:p@"))
    assert "math' is not up, and neither is its RabbitMQ" in swarmq("status", run.path).output


def test_the_broker_is_asked_where_the_run_is_up_or_the_broker_is_not_its_own(run: RunFolder) -> None:
    with run.lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert swarmq("status", run.path).output == "swarmq: cannot be reached\n"
    (run.broker / "node.json").unlink()
    assert swarmq("status", run.path).output == "swarmq: cannot be reached\n"


def test_watching_ends_with_the_run_and_says_how_to_go_on(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    held = run.lock.open()
    fcntl.flock(held, fcntl.LOCK_EX)

    @asynccontextmanager
    async def serve(*_: object, **__: object) -> AsyncIterator[MemoryBroker]:
        try:
            yield MemoryBroker()
        finally:
            log.warning("broker_closed_badly")

    async def up_for_a_moment(*_: object, **__: object) -> None:
        log.warning("broker_lost")
        held.close()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(amqp.AmqpBroker, "open", serve)
    monkeypatch.setattr(monitor, "watch", up_for_a_moment)
    assert swarmq("watch", run.path).output == (
        f"swarmq: run 'math' is not up, and neither is its RabbitMQ; to continue the run: `swarmq up {run.job}`\n"
    )


def test_a_feed_that_is_interrupted_fails_and_says_how_to_go_on(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def interrupt(*_: object, **__: object) -> AsyncIterator[MemoryBroker]:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.get_running_loop().create_future()
        yield MemoryBroker()

    (run.broker / "node.json").unlink()
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')
    monkeypatch.setattr(amqp.AmqpBroker, "open", interrupt)
    told = swarmq("feed", run.path, tmp_path / "tasks.jsonl")
    words = "stopped before every task was on the queue; the same command without --restart continues"
    assert (told.exit_code, told.output) == (1, f"swarmq: {words}\n")


def test_the_status_is_one_json_object(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def serve(*_: object, **__: object) -> AsyncIterator[MemoryBroker]:
        log.warning("broker_lost")
        yield MemoryBroker()

    (run.broker / "node.json").unlink()
    write_as_an_older_release(run)
    monkeypatch.setattr(amqp.AmqpBroker, "open", serve)
    told = swarmq("status", run.path, "--json")
    assert (told.exit_code, told.stderr) == (0, RENAMED)
    data = msgspec.json.decode(told.stdout)
    assert (data["run"], data["warnings"][0]["text"]) == ("math", "broker lost")


def test_listed_runs_are_json_alone(run: RunFolder) -> None:
    write_as_an_older_release(run)
    told = swarmq("runs", run.path.parent, "--json")
    assert (msgspec.json.decode(told.stdout)["run"], told.stderr) == ("math", RENAMED)


RENAMED = "warning: setting renamed: setting groups.silence_s, action write groups.idle_timeout_s in its place; the value is used\n"


def write_as_an_older_release(run: RunFolder) -> None:
    """Give a setting its former name, which is warned of once in a process."""
    run.resolved.write_text(run.resolved.read_text().replace("idle_timeout_s", "silence_s"))
    config._warn_of_former.cache_clear()
