"""At a stop a learner gets the time that its checkpoints take, and people are told what is waited for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from swarmq.config import Policy, SwarmJob
from swarmq.learner.batch_log import BatchLog
from swarmq.up.keeping import Daemon
from swarmq.up.stopping import drain_s, farewell, stop
from unit.learner.test_batch_log import OURS, batch, drops
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
    await stop(daemon, grace_s, told.append)
    return told


def first_line(path: Path) -> str:
    with path.open() as source:
        return source.readline()


async def test_people_are_told_how_long_a_stop_waits_for_a_learner(tmp_path: Path) -> None:
    assert await stopped(tmp_path, "learner.main", OBEDIENT, grace_s=30.0) == [
        "learner.main: stopping; it has 30 s to write its checkpoint, Ctrl-C again ends it without"
    ]


async def test_people_are_told_when_a_learner_was_not_done_in_time(tmp_path: Path) -> None:
    assert (await stopped(tmp_path, "learner.main", STUBBORN, grace_s=0.1))[1:] == [
        "learner.main: not done in time; steps since its newest checkpoint are made again from the batch log"
    ]


async def test_parts_other_than_learners_are_stopped_without_a_word(tmp_path: Path) -> None:
    assert await stopped(tmp_path, "proxy", STUBBORN, grace_s=0.1) == []


def test_who_stops_a_run_is_told_how_it_goes_on(tmp_path: Path) -> None:
    names = ("planner", "executor")
    job = SwarmJob(run="r", folder=str(tmp_path), policies={name: Policy(model="m") for name in names})
    assert farewell(job) == "stopped", "before there is a folder there is nothing to go on with"
    job.run_folder.path.mkdir()
    job.run_folder.job.write_text(job.to_toml())
    again = f"stopped. `swarmq up {job.run_folder.job}` goes on"
    assert farewell(job) == again
    log = BatchLog(job.run_folder.batch_log("planner"), OURS)
    for record in (batch(1), batch(2), drops(3, 3)):
        log.append(record)
    log.close()
    assert farewell(job) == f"{again} after steps 2 (planner), 0 (executor)"
    alone = SwarmJob(run="r", folder=str(tmp_path), policies={"planner": Policy(model="m")})
    assert farewell(alone) == f"{again} after step 2"
