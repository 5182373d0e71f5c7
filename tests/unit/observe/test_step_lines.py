"""The line that a log has of each step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from swarmq.config import SwarmJob
from swarmq.errors import BrokerError
from swarmq.messages import Event, EventName
from swarmq.observe.board import Board
from swarmq.observe.step_lines import StepLines, follow_steps, mean_reward
from swarmq.runtime.logs import redirect_to
from swarmq.testing import MemoryBroker


def event(name: EventName, source: str = "learner.main", *, at: float = 1.0, **fields: Any) -> Event:
    return Event(run="r", source=source, name=name, at=at, fields=fields)


def step(version: int, **fields: Any) -> Event:
    return event("step", **({"at": 1.0, "version": version, "reward": 0.5, "episodes": 64, "step_s": 5.0} | fields))


def test_a_step_is_told_once_with_what_held_it_up() -> None:
    board = Board(run="r")
    lines = StepLines(board)
    board.fold(step(1))
    board.fold(step(2, wait_s=4.5, dropped={"stale": 2, "overlong": 1}, skipped="gradient_not_finite"))
    assert lines.has_news(board)
    assert list(lines.take()) == [
        "step 1: reward 0.500, 64 episodes, 5.0 s",
        "step 2: reward 0.500, 64 episodes, 5.0 s, waited 4.5 s for episodes, 3 dropped, skipped (gradient_not_finite)",
    ]
    assert not lines.has_news(board)
    assert list(lines.take()) == []


def test_a_held_out_reward_is_told_when_it_is_new() -> None:
    board = Board(run="r")
    lines = StepLines(board)
    kinds = {
        "sum": {"reward": 1.0, "tasks": 3},
        "product": {"reward": 0.0, "tasks": 1},
        "new": {"reward": None, "tasks": 0},
    }
    board.fold(event("evaluated", "collector", at=5.0, version=4, kinds=kinds))
    for version in (4, 5):
        board.fold(step(version))
    told = list(lines.take())
    assert told[0].startswith("step 4: reward 0.500, held-out 0.750 at step 4, 64 episodes")
    assert "held-out" not in told[1]


def test_queues_and_the_pace_are_told_when_they_matter() -> None:
    board = Board(run="r")
    lines = StepLines(board)
    board.depths = {"swarmq.r.in": 1000}
    board.fold(step(1, reward=None))
    assert list(lines.take()) == ["step 1: reward -, 64 episodes, 5.0 s"]
    board.depths, board.blocked = {"swarmq.r.in": 1001}, True
    board.fold(event("state", "collector", pace="draining"))
    board.fold(step(2))
    [line] = lines.take()
    assert line.endswith(
        "5.0 s, RabbitMQ accepts no messages, 1001 messages wait for the collector, the run is draining"
    )


def test_policies_are_named_where_there_are_several() -> None:
    board = Board(run="r")
    lines = StepLines(board)
    board.fold(step(1))
    board.fold(event("step", "learner.judge", version=7, reward=0.25, episodes=8, step_s=1.0))
    assert [line.split(":")[0] for line in lines.take()] == ["step 1 of main", "step 7 of judge"]


def test_an_evaluation_without_a_result_has_no_mean() -> None:
    assert mean_reward({"kinds": {"sum": {"reward": None, "tasks": 0}}}) is None
    assert mean_reward({}) is None


async def test_steps_before_the_start_are_not_told_again(tmp_path: Path) -> None:
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "m"}}})
    job.run_folder.path.mkdir()
    job.run_folder.events.write_bytes(msgspec.json.encode(step(6)) + b"\n")
    lines, told, broker = list[str](), asyncio.Event(), MemoryBroker()

    def report(line: str) -> None:
        lines.append(line)
        told.set()

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow_steps(job, broker, report))
        while not told.is_set():
            await broker.emit(step(7, at=2.0))
            await asyncio.sleep(0.01)
        following.cancel()
    assert lines == ["step 7: reward 0.500, 64 episodes, 5.0 s"]


async def test_a_broker_that_refuses_its_events_does_not_end_the_run(tmp_path: Path) -> None:
    class Refusing(MemoryBroker):
        def events(self, run: str) -> Any:
            raise BrokerError(f"no events of {run} for you")

    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "m"}}})
    lines: list[str] = []
    with redirect_to(lines.append):
        async with asyncio.timeout(30):
            await follow_steps(job, Refusing(), lines.append)
    assert lines == ["warning: steps not followed: reason no events of r for you"]
