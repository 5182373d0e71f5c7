"""A line for each step of a run, for logs and terminals without a live board: step, reward, held-out reward, seconds, and
what delays the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import structlog

from swarmq.broker import Broker, topology
from swarmq.config import SwarmJob
from swarmq.errors import BrokerError
from swarmq.observe.board import Board
from swarmq.observe.monitor import Follower, follow
from swarmq.runtime.wording import count_of

log = structlog.get_logger()

LONG_QUEUE = 1000
"""Minimum number of messages, batches included, in the collector's queue at which a line mentions the queue."""
WAIT_SHARE = 0.5
"""Minimum share of a step spent waiting at which its line mentions the waiting."""


class StepLines:
    """The steps of a board that have not been reported yet."""

    def __init__(self, board: Board) -> None:
        """Count the board's present steps and evaluations as reported."""
        self._board = board
        self._reported_steps = {policy: int(steps[-1].get("version", 0)) for policy, steps in board.steps.items()}
        self._reported_round_at = max((at for at, _ in board.rounds), default=0.0)

    def has_news(self, board: Board) -> bool:
        return any(
            int(steps[-1].get("version", 0)) > self._reported_steps.get(policy, 0)
            for policy, steps in board.steps.items()
        )

    def take(self) -> Iterator[str]:
        """Yield a line for each new step, policy by policy."""
        for policy, steps in self._board.steps.items():
            of = f" of {policy}" if len(self._board.steps) > 1 else ""
            for step in list(steps):
                if (version := int(step.get("version", 0))) > self._reported_steps.get(policy, 0):
                    self._reported_steps[policy] = version
                    yield f"step {version}{of}: {', '.join(self._describe(step))}"

    def _describe(self, step: dict[str, Any]) -> Iterator[str]:
        seconds = float(step.get("step_s") or 0.0)
        yield f"reward {_format(step.get('reward'))}"
        yield from self._new_evaluations()
        yield count_of(step.get("episodes", 0), "episode")
        yield f"{seconds:.1f} s"
        if (waited := float(step.get("wait_s") or 0.0)) > max(WAIT_SHARE * seconds, 1.0):
            yield f"waited {waited:.1f} s for episodes"
        if dropped := sum(step.get("dropped", {}).values()):
            yield f"{dropped} dropped"
        if step.get("skipped"):
            yield f"skipped ({step['skipped']})"
        yield from _queue_notes(self._board)

    def _new_evaluations(self) -> Iterator[str]:
        for at, results in list(self._board.rounds):
            if at > self._reported_round_at:
                self._reported_round_at = at
                yield f"held-out {_format(mean_reward(results))} at step {results.get('version', '?')}"


def mean_reward(results: dict[str, Any]) -> float | None:
    """Return the mean reward over all kinds of an evaluation, weighted by their tasks, or None without any."""
    kinds = [(one["reward"], one.get("tasks", 1)) for one in results.get("kinds", {}).values()]
    rewards = [(float(reward), tasks) for reward, tasks in kinds if reward is not None]
    tasks_in_all = sum(tasks for _, tasks in rewards)
    return sum(reward * tasks for reward, tasks in rewards) / tasks_in_all if tasks_in_all else None


async def report_steps(follower: Follower, lines: StepLines, report: Callable[[str], None]) -> None:
    """Report each new step of a followed run until cancelled."""
    while True:
        await follower.until(lines.has_news)
        for line in lines.take():
            report(line)


async def follow_steps(job: SwarmJob, broker: Broker, report: Callable[[str], None]) -> None:
    """Report each further step of a run until cancelled. A broker that refuses the events ends the reports, not the run."""
    try:
        async with follow(job, broker) as follower:
            await report_steps(follower, StepLines(follower.board), report)
    except BaseExceptionGroup as group:
        refused, others = group.split(BrokerError)
        if others or not refused:
            raise
        log.warning("steps_not_followed", reason=str(refused.exceptions[0]))


def _queue_notes(board: Board) -> Iterator[str]:
    if board.blocked:
        yield "RabbitMQ accepts no messages"
    waiting = sum(num for queue, num in board.depths.items() if topology.parse_turns_run(queue) == board.run)
    if waiting > LONG_QUEUE:
        yield f"{waiting} messages wait for the collector"
    if (pace := board.reported("collector").get("pace", "running")) != "running":
        yield f"the run is {pace}"


def _format(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
