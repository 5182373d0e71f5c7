"""At a stop a learner gets the time that its checkpoints take, and people are told what is waited for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from swarmq.collector.decide.effects import SaveControl
from swarmq.collector.store import Store
from swarmq.config import Policy, SwarmJob
from swarmq.errors import BrokerError
from swarmq.keys import Invite
from swarmq.learner.store.batch_log import BatchLog
from swarmq.messages import Change, Control, Event
from swarmq.testing import MemoryBroker
from swarmq.up.deployment import Deployment, keep_learners
from swarmq.up.shutdown import describe_stopped_run, drain_s, stop_daemon
from swarmq.up.supervision import Daemon
from unit.learner.store.test_batch_log import OURS, batch, drops
from unit.up.test_placement import QWEN

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
OBEDIENT = "import time; print('up', flush=True); time.sleep(60)"


def job(folder: Path, *, layers: int) -> SwarmJob:
    (folder / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": layers}))
    return SwarmJob(run="r", policies={"main": Policy(model=str(folder))})


def test_a_learner_has_time_for_two_checkpoints_on_a_slow_disk_and_not_for_ever(tmp_path: Path) -> None:
    assert drain_s(job(tmp_path, layers=36), "learner.main") == pytest.approx(60 + 2 * 12 * 4.02e9 / 100e6, rel=0.01)
    assert drain_s(job(tmp_path, layers=3600), "learner.main") == 1800
    assert drain_s(job(tmp_path, layers=36), "collector") == 30
    assert drain_s(job(tmp_path, layers=36), "proxy.1") == 15


def test_a_model_that_cannot_be_read_is_the_learners_to_complain_of(tmp_path: Path) -> None:
    nowhere = SwarmJob(run="r", policies={"main": Policy(model=str(tmp_path))})
    assert drain_s(nowhere, "learner.main") == 60


async def stopped(folder: Path, name: str, program: str, *, grace_s: float) -> list[str]:
    """What is told."""
    told: list[str] = []
    daemon = Daemon(name, [sys.executable, "-c", program], folder / "log")
    os.mkfifo(daemon.log_path)
    runs = asyncio.get_running_loop().run_in_executor(None, first_line, daemon.log_path)
    await daemon.start()
    await runs
    await stop_daemon(daemon, grace_s, told.append)
    return told


def first_line(path: Path) -> str:
    with path.open() as source:
        return source.readline()


async def test_people_are_told_how_long_a_stop_waits_for_a_learner(tmp_path: Path) -> None:
    assert await stopped(tmp_path, "learner.main", OBEDIENT, grace_s=30.0) == [
        "learner.main: stopping, with 30 s to write its checkpoint; Ctrl-C again stops without a checkpoint"
    ]


async def test_people_are_told_when_a_learner_was_not_done_in_time(tmp_path: Path) -> None:
    assert (await stopped(tmp_path, "learner.main", STUBBORN, grace_s=0.1))[1:] == [
        "learner.main: killed after its time to stop; steps since its newest checkpoint will be repeated from the batch log"
    ]


async def test_parts_other_than_learners_are_stopped_without_a_word(tmp_path: Path) -> None:
    assert await stopped(tmp_path, "proxy", STUBBORN, grace_s=0.1) == []


def test_who_stops_a_run_is_told_how_it_goes_on(tmp_path: Path) -> None:
    names = ("planner", "executor")
    job = SwarmJob(run="r", folder=str(tmp_path), policies={name: Policy(model="m") for name in names})
    assert describe_stopped_run(job) == "stopped", "before there is a folder there is nothing to go on with"
    job.run_folder.path.mkdir()
    job.run_folder.job.write_text(job.to_toml())
    again = f"stopped. `swarmq up {job.run_folder.job}` continues"
    assert describe_stopped_run(job) == again
    log = BatchLog(job.run_folder.batch_log("planner"), OURS)
    for record in (batch(1), batch(2), drops(3, 3)):
        log.append(record)
    log.close()
    assert describe_stopped_run(job) == f"{again} after steps 2 (planner), 0 (executor)"
    alone = SwarmJob(run="r", folder=str(tmp_path), policies={"planner": Policy(model="m")})
    assert describe_stopped_run(alone) == f"{again} after step 2"


LAST = "policies.main.train.max_steps"


def ended_at_two(folder: Path, *changes: Change, **train: int) -> SwarmJob:
    """A run whose only policy has made two steps; `changes` were made while it was up."""
    job = SwarmJob.build({"run": "r", "folder": str(folder), "policies": {"main": {"model": "m", "train": train}}})
    job.run_folder.path.mkdir()
    job.run_folder.job.write_text(job.to_toml())
    log = BatchLog(job.run_folder.batch_log("main"), OURS)
    for record in (batch(1), batch(2)):
        log.append(record)
    log.close()
    store = Store(job.run_folder.inbox, run="r")
    with store.transaction():
        store.write(SaveControl(msgspec.msgpack.encode(Control(run="r", number=1, changes=changes))))
    store.close()
    return job


def test_a_run_that_was_stopped_is_said_to_train_on_once_it_is_resumed(tmp_path: Path) -> None:
    job = ended_at_two(tmp_path, Change(number=1, path=LAST, before=0, value=1, base=0))
    folder = job.run_folder
    assert describe_stopped_run(job) == (
        f"stopped. `swarmq up {folder.job}` serves its weights again. main has made its last step, 2; to train further while "
        f"the run is up: `swarmq resume {folder.path}`"
    )


def test_a_run_that_has_reached_its_files_last_step_is_said_to_train_on_once_that_is_set(tmp_path: Path) -> None:
    job = ended_at_two(tmp_path, max_steps=2)
    folder = job.run_folder
    assert describe_stopped_run(job) == (
        f"stopped. `swarmq up {folder.job}` serves its weights again. main has made its last step, 2; to train further while "
        f"the run is up: `swarmq set {folder.path} {LAST}=0`"
    )


def test_a_run_whose_last_step_is_ahead_goes_on(tmp_path: Path) -> None:
    job = ended_at_two(tmp_path, Change(number=1, path=LAST, before=0, value=3, base=0))
    assert describe_stopped_run(job) == f"stopped. `swarmq up {job.run_folder.job}` continues after step 2"


def test_of_two_policies_only_the_one_with_steps_to_go_is_said_to_go_on(tmp_path: Path) -> None:
    job = ended_at_two(tmp_path, Change(number=1, path=LAST, before=0, value=2, base=0))
    both = msgspec.structs.replace(job, policies={**job.policies, "judge": Policy(model="m")})
    assert describe_stopped_run(both) == (
        f"stopped. `swarmq up {job.run_folder.job}` continues after step 0 (judge). main has made its last step, 2; to train further "
        f"while the run is up: `swarmq resume {job.run_folder.path}`"
    )


def deployed(job: SwarmJob, program: str, folder: Path) -> Deployment:
    """A run whose learner is a process that does this, and ends."""
    invite = Invite(
        run="r", client="host", secret=b"s", amqp_url="", base_url="", policies=("main",), kinds=(), group_size=2
    )
    deployment = Deployment(job, None, invite, engines={}, placements={})
    deployment.daemons["learner.main"] = Daemon("learner.main", [sys.executable, "-c", program], folder / "log")
    return deployment


async def test_a_learner_that_has_ended_is_started_again_for_further_steps(tmp_path: Path) -> None:
    job = ended_at_two(tmp_path, Change(number=1, path=LAST, before=0, value=2, base=0))
    starts = tmp_path / "starts"
    deployment = deployed(job, f"open({str(starts)!r}, 'a').write('x')", tmp_path)
    await deployment.daemons["learner.main"].start()
    broker, told = MemoryBroker(), list[str]()
    ended = Change(number=1, path=LAST, before=0, value=2, base=0)

    async def say(*changes: Change) -> None:
        fields = {"changes": msgspec.to_builtins(changes), "versions": {"main": 1}}  # 2 is not reported yet
        await broker.emit(Event(run="r", source="collector", name="state", at=0.0, fields=fields))
        await asyncio.sleep(0)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keep_learners(deployment, broker, told.append))
        await deployment.learners_done.wait()
        for _ in range(20):
            await say(ended)
        assert not deployment.learning.is_set()
        while not deployment.learning.is_set():
            await say()
        await deployment.learners_done.wait()
        keeping.cancel()
    assert starts.read_text() == "xx"
    assert told == []


async def test_a_broker_that_refuses_events_ends_no_run(tmp_path: Path) -> None:
    class Refusing(MemoryBroker):
        @asynccontextmanager
        async def events(self, run: str) -> AsyncIterator[AsyncIterator[Event]]:
            asked.set()
            raise BrokerError(f"no events of {run}")
            yield

    asked = asyncio.Event()
    job = ended_at_two(tmp_path, max_steps=2)
    deployment = deployed(job, "pass", tmp_path)
    await deployment.daemons["learner.main"].start()
    async with asyncio.timeout(60):
        keeping = asyncio.create_task(keep_learners(deployment, Refusing(), [].append))
        await asked.wait()
        for _ in range(20):
            await asyncio.sleep(0)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
