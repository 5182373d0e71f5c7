"""Many episodes from a list of tasks, with bounded concurrency, retries and progress; an agent's exception never ends the run.

tasks ──> plans (repeats of a task one after another) ──> `concurrency` lanes ──> begin, agent, end
                                                                ^______________________|  failed: next attempt
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sized
from typing import Any

import msgspec

from swarmq.client.data.tasks import SlotNumbering, SwarmTask, as_task
from swarmq.client.episodes.client import EpisodeClient, EpisodeOptions
from swarmq.client.runners.attempts import Agent, AgentFunction, AttemptResult, RunnerOptions, attempt
from swarmq.client.runners.circuit_breaker import CircuitBreaker
from swarmq.client.runners.progress import Display
from swarmq.client.runners.report import EvalReport, RunSummary, Tally, make_eval_report
from swarmq.errors import TaskError
from swarmq.messages import Slot

Tasks = Iterable[Any] | AsyncIterable[Any]
_END = object()


class PlannedSlot(msgspec.Struct, frozen=True):
    """A slot that is to be attempted, with its task."""

    task: SwarmTask
    slot: Slot
    group_size: int


async def train_on_tasks(
    client: EpisodeClient,
    tasks: Tasks,
    function: AgentFunction,
    episodes: EpisodeOptions,
    options: RunnerOptions,
    *,
    repeats: int | None,
    epochs: int,
    first_epoch: int | None,
) -> RunSummary:
    """Implement `AsyncSwarmClient.run_episodes_until_all_complete`."""

    def read_group_size(task: SwarmTask) -> int:
        """Return the group size when the task is planned, because it can change while the run is up."""
        return repeats or client.group_size_of(client.resolve_kind(episodes.kind or task.kind))

    numbering = client.numbering if first_epoch is None else None
    slots = plan_slots(
        tasks, repeats=repeats or read_group_size, epochs=epochs, numbering=numbering, first_epoch=first_epoch or 0
    )
    runner = TaskListRunner(client, function, episodes, options)
    expected_repeats = repeats or client.invite.group_size
    total = len(tasks) * expected_repeats * epochs if isinstance(tasks, Sized) else None
    interval_s = client.limits.progress_interval_s
    with Display("episodes", total=total, shown=options.progress, interval_s=interval_s) as display:
        await runner.run(slots, display.update)
    return runner.tally.summary(runner.seconds)


async def evaluate_tasks(
    client: EpisodeClient,
    tasks: Tasks,
    function: AgentFunction,
    episodes: EpisodeOptions,
    options: RunnerOptions,
    *,
    repeats: int,
) -> EvalReport:
    """Implement `AsyncSwarmClient.evaluate`."""
    runner = TaskListRunner(client, function, episodes, options)
    finished: list[AttemptResult] = []

    def keep(tally: Tally, attempted: AttemptResult) -> None:
        if attempted.finished:
            finished.append(attempted)
        display.update(tally, attempted)

    total = len(tasks) * repeats if isinstance(tasks, Sized) else None
    interval_s = client.limits.progress_interval_s
    with Display("evaluation", total=total, shown=options.progress, interval_s=interval_s) as display:
        slots = plan_slots(tasks, repeats=repeats, epochs=1, numbering=client.numbering)
        await runner.run(slots, keep)
    tally = runner.tally
    return make_eval_report(finished, failed=tally.given_up, failures=tally.most_failures, seconds=runner.seconds)


async def plan_slots(
    tasks: Tasks,
    *,
    repeats: int | Callable[[SwarmTask], int],
    epochs: int,
    numbering: SlotNumbering | None,
    first_epoch: int = 0,
) -> AsyncIterator[PlannedSlot]:
    """Yield the slots in the order of their attempts, the repeats of a task together. Tasks are read when they are needed.

    With `numbering`, every task that is read is a group of its own; without, a task id may occur only once per epoch. Raises
    TaskError for a second occurrence, and for an iterator that can be read only once although there are several epochs.
    """
    if epochs < 1 or (isinstance(repeats, int) and repeats < 1):
        raise TaskError(f"repeats is {repeats} and epochs is {epochs}: both must be at least 1")
    if epochs > 1 and isinstance(tasks, Iterator | AsyncIterator):
        raise TaskError("epochs > 1 needs tasks that can be read more than once: pass a list instead of an iterator")
    for epoch in range(first_epoch, first_epoch + epochs):
        index, seen = 0, set[str]()
        async for value in _iterate(tasks):
            task = as_task(value, default_id=f"task-{index}")
            index += 1
            if numbering is None and task.id in seen:
                raise TaskError(f"task {index} has the id {task.id!r} of an earlier one: ids must differ")
            if numbering is None:
                seen.add(task.id)
            number = epoch if numbering is None else numbering.fresh_epoch()
            size = repeats if isinstance(repeats, int) else repeats(task)
            for repeat in range(size):
                yield PlannedSlot(task, Slot(task_id=task.id, repeat=repeat, epoch=number), size)


class TaskListRunner:
    """Runner with `concurrency` lanes, each of which takes the next slot and attempts it until it has a reward or no attempts
    are left."""

    def __init__(
        self, client: EpisodeClient, function: AgentFunction, episodes: EpisodeOptions, options: RunnerOptions
    ) -> None:
        self._client = client
        self._agent = Agent(function, loop=client.agent_loop)
        self._episodes = msgspec.structs.replace(
            episodes, code_version=client.code_version_of(function), lifetime_s=options.attempt_timeout_s
        )
        self._options = options
        self._breaker = CircuitBreaker(
            lanes=options.concurrency, pause_s=options.retry_pause_s, serves=client.proxy_serves
        )
        self._next_slot_lock = asyncio.Lock()
        self.tally = Tally()
        self.seconds = 0.0

    async def run(self, slots: AsyncIterator[PlannedSlot], report: Callable[[Tally, AttemptResult], None]) -> None:
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(self._options.concurrency):
                    lanes.create_task(self._run_lane(slots, report))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the first lane to stop has cancelled the others
        finally:
            self.seconds = time.monotonic() - began

    async def _run_lane(
        self, slots: AsyncIterator[PlannedSlot], report: Callable[[Tally, AttemptResult], None]
    ) -> None:
        while True:
            async with self._next_slot_lock:
                planned = await anext(slots, None)
            if planned is None:
                return
            await self._fill(planned, report)

    async def _fill(self, planned: PlannedSlot, report: Callable[[Tally, AttemptResult], None]) -> None:
        for number in range(self._options.max_attempts):
            if number:
                await asyncio.sleep(self._breaker.retry_pause_s(number) * random.uniform(0.5, 1.5))
            await self._breaker.wait_for_turn()
            is_last = number + 1 == self._options.max_attempts
            options = msgspec.structs.replace(
                self._episodes,
                slot=planned.slot,
                group_size=planned.group_size,
                attempt=number,
                last_attempt=is_last,
            )
            ep = await self._client.begin(planned.task, options)
            done = await attempt(self._client, ep, self._agent, timeout_s=self._options.attempt_timeout_s)
            self._breaker.record(finished=done.finished)
            self.tally.add(done)
            self.tally.slots += is_last or done.finished
            self.tally.given_up += is_last and not done.finished
            report(self.tally, done)
            if done.finished:
                return


async def _iterate(tasks: Tasks) -> AsyncIterator[Any]:
    if isinstance(tasks, AsyncIterable):
        async for value in tasks:
            yield value
        return
    iterator = iter(tasks)
    while (value := await asyncio.to_thread(next, iterator, _END)) is not _END:
        yield value
