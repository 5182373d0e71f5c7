"""Many episodes from a list of tasks: bounded, retried, shown; one agent's exception never ends the run.

tasks ──> plans (repeats of a task one after another) ──> `concurrency` lanes ──> begin, agent, end
                                                              ^______________________|  failed: next attempt
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

import msgspec

from swarmq.client.data.tasks import Numbering, SwarmTask, as_task
from swarmq.client.runners.attempts import ATTEMPT_TIMEOUT_S, Agent, AgentFunction, Attempted, attempt, check_timeout
from swarmq.client.runners.outage import Outage
from swarmq.client.runners.progress import Display
from swarmq.client.runners.report import EvalReport, RunSummary, Tally, eval_report
from swarmq.errors import TaskError
from swarmq.messages import Mode, Slot

if TYPE_CHECKING:
    from swarmq.client.episodes.async_client import AsyncSwarmClient

RETRY_PAUSE_S = 1.0
"""Before the second attempt; doubled before each further one, so that a short outage does not use them all up."""

Tasks = Iterable[Any] | AsyncIterable[Any]
_END = object()


class Plan(msgspec.Struct, frozen=True):
    """One slot to fill."""

    task: SwarmTask
    slot: Slot
    group_size: int


async def run_episodes_until_all_complete(
    client: AsyncSwarmClient,
    tasks: Tasks,
    function: AgentFunction,
    *,
    concurrency: int = 16,
    repeats: int | None = None,
    epochs: int = 1,
    first_epoch: int | None = None,
    policies: Sequence[str] | None = None,
    kind: str | None = None,
    auto_retry: bool = True,
    max_attempts: int = 3,
    retry_pause_s: float = RETRY_PAUSE_S,
    attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
    progress: bool = True,
) -> RunSummary:
    """Attempt every task `repeats` times (the run's group size) in each epoch, `concurrency` episodes at a time.

    `function(ep)` returns a reward or an Outcome; an ordinary function runs in a thread, a coroutine function on the
    event loop. When it raises, the episode has failed, its traceback is shown once, and the slot is attempted again; so
    it is when it has not returned after `attempt_timeout_s`.
    Each call makes slots of its own, to be trained in addition to all before; with `first_epoch` the slots are the
    same at every start, and those that were trained already are not trained again.
    """

    def size(task: SwarmTask) -> int:
        """As it is when the task's turn comes: it can change while the run is up."""
        return repeats or client.group_size_of(client.known_kind(kind or task.kind))

    numbering = client.numbering if first_epoch is None else None
    plans = plan(tasks, repeats=repeats or size, epochs=epochs, numbering=numbering, first_epoch=first_epoch or 0)
    lanes = _Lanes(
        client,
        function,
        mode="train",
        policies=policies,
        kind=kind,
        max_attempts=max_attempts if auto_retry else 1,
        retry_pause_s=retry_pause_s,
        attempt_timeout_s=attempt_timeout_s,
    )
    guess = repeats or client.invite.group_size
    total = len(tasks) * guess * epochs if isinstance(tasks, Sized) else None
    with Display("episodes", total=total, shown=progress) as display:
        await lanes.run(plans, concurrency, display.update)
    return lanes.tally.summary(lanes.seconds)


async def evaluate(
    client: AsyncSwarmClient,
    tasks: Tasks,
    function: AgentFunction,
    *,
    repeats: int = 1,
    concurrency: int = 16,
    policies: Sequence[str] | None = None,
    kind: str | None = None,
    max_attempts: int = 3,
    retry_pause_s: float = RETRY_PAUSE_S,
    attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
    progress: bool = True,
) -> EvalReport:
    """Attempt every task `repeats` times without training: needs no tickets, and the agent's own sampling holds."""
    lanes = _Lanes(
        client,
        function,
        mode="eval",
        policies=policies,
        kind=kind,
        max_attempts=max_attempts,
        retry_pause_s=retry_pause_s,
        attempt_timeout_s=attempt_timeout_s,
    )
    done: list[Attempted] = []

    def keep(tally: Tally, attempted: Attempted) -> None:
        if attempted.finished:
            done.append(attempted)
        display.update(tally, attempted)

    total = len(tasks) * repeats if isinstance(tasks, Sized) else None
    with Display("evaluation", total=total, shown=progress) as display:
        plans = plan(tasks, repeats=repeats, epochs=1, numbering=client.numbering)
        await lanes.run(plans, concurrency, keep)
    return eval_report(done, failed=lanes.tally.given_up, seconds=lanes.seconds)


async def plan(
    tasks: Tasks,
    *,
    repeats: int | Callable[[SwarmTask], int],
    epochs: int,
    numbering: Numbering | None,
    first_epoch: int = 0,
) -> AsyncIterator[Plan]:
    """The slots in the order they are attempted, siblings together. Nothing is read before it is needed.

    With `numbering` every task seen is a group of its own; without, a task id may come only once per epoch.
    Raises TaskError for a second one, and for a one-way iterator that would have to be read once per epoch.
    """
    if epochs < 1 or (isinstance(repeats, int) and repeats < 1):
        raise TaskError(f"repeats is {repeats} and epochs is {epochs}: both must be at least 1")
    if epochs > 1 and isinstance(tasks, Iterator | AsyncIterator):
        raise TaskError("epochs > 1 needs tasks that can be read more than once: pass a list instead of an iterator")
    for epoch in range(first_epoch, first_epoch + epochs):
        index, seen = 0, set[str]()
        async for value in _each(tasks):
            task = as_task(value, default_id=f"task-{index}")
            index += 1
            if numbering is None and task.id in seen:
                raise TaskError(f"task {index} has the id {task.id!r} of an earlier one: ids must differ")
            if numbering is None:
                seen.add(task.id)
            number = epoch if numbering is None else numbering.fresh_epoch()
            size = repeats if isinstance(repeats, int) else repeats(task)
            for repeat in range(size):
                yield Plan(task, Slot(task_id=task.id, repeat=repeat, epoch=number), size)


class _Lanes:
    """`concurrency` loops that take the next plan and attempt it until it has a reward or no attempts are left."""

    def __init__(
        self,
        client: AsyncSwarmClient,
        function: AgentFunction,
        *,
        mode: Mode,
        policies: Sequence[str] | None,
        kind: str | None,
        max_attempts: int,
        retry_pause_s: float,
        attempt_timeout_s: float,
    ) -> None:
        check_timeout(attempt_timeout_s)
        if max_attempts < 1:
            raise TaskError(f"max_attempts is {max_attempts}: it must be at least 1")
        self._client = client
        self._agent = Agent(function, loop=client.agent_loop)
        self._begin: dict[str, Any] = {
            "mode": mode,
            "policies": policies,
            "kind": kind,
            "code_version": client.code_version_of(function),
            "lifetime_s": attempt_timeout_s,
        }
        self._attempt_timeout_s = attempt_timeout_s
        self._max_attempts = max_attempts
        self._retry_pause_s = retry_pause_s
        self.tally = Tally()
        self.seconds = 0.0

    async def run(
        self, plans: AsyncIterator[Plan], concurrency: int, report: Callable[[Tally, Attempted], None]
    ) -> None:
        if concurrency < 1:
            raise TaskError(f"concurrency is {concurrency}: it must be at least 1")
        began = time.monotonic()
        turn = asyncio.Lock()
        self._outage = Outage(lanes=concurrency, pause_s=self._retry_pause_s, serves=self._client.proxy_serves)
        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(concurrency):
                    lanes.create_task(self._lane(plans, turn, report))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the first lane to stop has cancelled the others
        finally:
            self.seconds = time.monotonic() - began

    async def _lane(
        self, plans: AsyncIterator[Plan], turn: asyncio.Lock, report: Callable[[Tally, Attempted], None]
    ) -> None:
        while True:
            async with turn:
                following = await anext(plans, None)
            if following is None:
                return
            await self._fill(following, report)

    async def _fill(self, following: Plan, report: Callable[[Tally, Attempted], None]) -> None:
        for number in range(self._max_attempts):
            if number:
                await asyncio.sleep(self._retry_pause_s * 2 ** (number - 1) * random.uniform(0.5, 1.5))
            await self._outage.may_begin()
            is_last = number + 1 == self._max_attempts
            ep = await self._client.begin_episode(
                following.task,
                slot=following.slot,
                group_size=following.group_size,
                attempt=number,
                last_attempt=is_last,
                **self._begin,
            )
            done = await attempt(self._client, ep, self._agent, timeout_s=self._attempt_timeout_s)
            self._outage.heard(finished=done.finished)
            self.tally.add(done)
            self.tally.slots += is_last or done.finished
            self.tally.given_up += is_last and not done.finished
            report(self.tally, done)
            if done.finished:
                return


async def _each(tasks: Tasks) -> AsyncIterator[Any]:
    if isinstance(tasks, AsyncIterable):
        async for value in tasks:
            yield value
        return
    iterator = iter(tasks)
    while (value := await asyncio.to_thread(next, iterator, _END)) is not _END:
        yield value
