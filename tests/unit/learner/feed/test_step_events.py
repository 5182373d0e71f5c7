"""No step is missing from the event file, or from who listens, because the broker was away or the disk was full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.episodes import make_group
from swarmq.learner.feed.step_events import StepEvents
from swarmq.learner.store import records
from swarmq.messages import Event
from swarmq.observe.curves import read_events
from swarmq.testing import MemoryBroker
from unit.learner.feed.test_process import broker_with, desk, job, stopped


def step(version: int) -> Event:
    return Event(run="r", source="learner.main", name="step", at=float(version), fields={"version": version})


def versions(path: Path) -> list[int]:
    return [event.fields["version"] for event in read_events(path)]


async def test_steps_of_an_alarm_are_recorded_at_once_and_told_in_order_when_it_is_over(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"), make_group("b"))
    async with desk(tmp_path, broker) as trainer, broker.events("r") as events:
        await trainer.batch()
        broker.alarm(on=True)
        await trainer.send(records.StepDone(version=1))
        await trainer.batch()
        assert versions(job(tmp_path).run_folder.events) == [1]
        await trainer.send(records.StepDone(version=2))
        broker.alarm(on=False)
        heard = [(await anext(event async for event in events if event.name == "step")).fields["version"] for _ in "12"]
        await stopped(trainer)
    assert heard == [1, 2]
    assert versions(job(tmp_path).run_folder.events) == [1, 2]


async def test_a_step_is_told_once_when_its_broker_comes_back(tmp_path: Path) -> None:
    broker = MemoryBroker()
    steps = StepEvents(tmp_path / "events.jsonl", broker)
    broker.away(gone=True)
    await steps.add(step(1))
    broker.away(gone=False)
    await steps.settle()
    await steps.settle()
    assert broker.emitted == [step(1)]


async def test_steps_wait_for_room_on_their_disk_and_the_broker_hears_them_meanwhile(tmp_path: Path) -> None:
    broker, path = MemoryBroker(), tmp_path / "events.jsonl"
    steps = StepEvents(path, broker)
    path.symlink_to("/dev/full")
    for version in (1, 2):
        await steps.add(step(version))
    assert broker.emitted == [step(1), step(2)]
    path.unlink()
    await steps.settle()
    assert versions(path) == [1, 2]


@pytest.mark.parametrize("cut", [b'{"type": "event", "ru', b'{"type": "event", "ru\\n', b""])
async def test_a_line_that_was_cut_takes_no_step_with_it(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(cut)
    await StepEvents(path, MemoryBroker()).add(step(1))
    assert versions(path) == [1]
    assert os.linesep * 2 not in path.read_text()
