"""What is kept of a run's events when nobody watches, and what a board that is opened late has of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
from collections import deque
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from swarmq.config import SwarmJob
from swarmq.learner.feed.step_events import StepEvents
from swarmq.learner.health.signs import find_signs
from swarmq.messages import Event, EventName
from swarmq.observe.curves import read_events
from swarmq.observe.monitor import draw_once, follow, follow_pace
from swarmq.testing import MemoryBroker


def job(folder: Path) -> SwarmJob:
    made = SwarmJob.build({"run": "r", "folder": str(folder), "policies": {"main": {"model": "m"}}})
    made.run_folder.path.mkdir()
    return made


def event(name: EventName, version: int) -> Event:
    return Event(run="r", source="learner.main", name=name, at=float(version), fields={"version": version})


@pytest.mark.parametrize("broken", [math.nan, math.inf])
async def test_signs_are_read_past_figures_that_were_not_finite(broken: float, tmp_path: Path) -> None:
    steps = StepEvents(tmp_path / "events.jsonl", MemoryBroker())
    figures = {"kl_k3": 0.1, "grad_norm": 1.0, "entropy": 1.0}
    for version in range(1, 21):
        failed = dict.fromkeys(figures, broken) | {"skipped": "gradient_not_finite"} if version == 15 else {}
        fields = figures | {"version": version} | failed
        await steps.add(Event(run="r", source="learner.main", name="step", at=0.0, fields=fields))
    read = [one.fields for one in read_events(tmp_path / "events.jsonl")]
    assert read[14]["grad_norm"] is None
    found = {finding.check: finding for finding in find_signs(read, 4)}
    assert {name for name, finding in found.items() if finding.level != "ok"} == {"mismatch", "steps skipped"}
    assert found["gradient growing"].text.startswith("gradient norm over that of the first 10 steps 1 (")


async def test_the_pace_of_a_run_is_told_whenever_it_is_another_one(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with contextlib.aclosing(follow_pace(job(tmp_path), broker)) as changes, asyncio.timeout(30):
        following = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)  # it listens
        for pace in ("running", "paused", "paused", "draining", "drained", "running"):
            said = {"pace": pace}
            await broker.emit(Event(run="r", source="collector", name="state", at=0.0, fields=said))
        told = [await following, *[await anext(changes) for _ in range(3)]]
    assert told == ["paused", "draining", "drained", "running"]


async def test_a_board_that_is_opened_late_has_the_steps_before_and_no_step_twice(tmp_path: Path) -> None:
    settings, broker = job(tmp_path), MemoryBroker()
    earlier = (event("step", 1), event("state", 1), event("warning", 1), event("step", 2))
    settings.run_folder.events.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in earlier))
    async with asyncio.timeout(30), follow(settings, broker) as follower:
        assert not follower.board.processes, "a state reported long ago is no sign of life"
        assert [warned.source for warned in follower.board.warnings] == ["learner.main"]
        await broker.emit(event("step", 2))  # on its way when the file was read
        await broker.emit(event("step", 3))
        await follower.until(lambda board: board.version == 3)
        assert [step["version"] for step in follower.board.steps["main"]] == [1, 2, 3]


async def test_a_board_says_that_the_broker_takes_no_messages(tmp_path: Path) -> None:
    broker = MemoryBroker()
    broker.alarm(on=True)
    shown = io.StringIO()
    await draw_once(job(tmp_path), broker, console=Console(file=shown, width=120))
    assert "RabbitMQ accepts no messages" in shown.getvalue()


async def test_what_the_watcher_itself_has_to_warn_of_stands_in_the_picture(tmp_path: Path) -> None:
    shown = io.StringIO()
    notes = deque(["warning: broker lost: wait s 2", "broker connected"])
    await draw_once(job(tmp_path), MemoryBroker(), console=Console(file=shown, width=120), notes=notes)
    assert "watch: broker lost: wait s 2" in shown.getvalue()
    assert "broker connected" not in shown.getvalue()


async def test_only_the_end_of_a_long_event_file_is_read(tmp_path: Path) -> None:
    path = job(tmp_path).run_folder.events
    path.write_bytes(b"".join(msgspec.json.encode(event("step", version)) + b"\n" for version in range(10, 99)))
    line = path.stat().st_size // 89
    newest = [one.fields["version"] for one in read_events(path, last_bytes=3 * line + 5)]
    assert newest == [96, 97, 98]


async def test_a_run_without_an_event_file_has_a_board(tmp_path: Path) -> None:
    async with asyncio.timeout(30), follow(job(tmp_path), MemoryBroker()) as follower:
        assert not follower.board.steps
