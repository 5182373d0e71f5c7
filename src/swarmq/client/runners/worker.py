"""`swarmq worker module:function`: attempt the tasks of a queue, on as many machines as you like.

    tasks.<kind> --prefetch = concurrency--> hold ──> begin, agent, end confirmed ──> ack
    tasks.<kind>.again ───────────────────────┘  ^────────── failed: once more here
                 ^──────── Task(attempt + 1) confirmed <──── failed again; then ack
                                              ├── killed: RabbitMQ gives the task to another worker
                                              └── cannot be attempted: given up, then parked

A group waits for its failed slots and meanwhile fills the window of its kind, so a first failure is attempted again at once. A
second failure may be this worker's fault, so another worker should try: the task goes to a separate queue of returned tasks. A
task stays for as many attempts as may fail by chance, judged by how often attempts usually fail.
All workers take from that queue in lanes of its own, beside the thousands of tasks that have not been attempted.

A task is held unacknowledged for as long as its episode takes. If the session is renewed meanwhile (the broker came back, or
an acknowledgement was about to be overdue), the same task is delivered again. The worker recognises it, and the running attempt
acknowledges the newest delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator

import msgspec

from swarmq.broker import Deliveries, Delivery, topology
from swarmq.client.data.targets import load_object
from swarmq.client.data.tasks import SwarmTask, strip_queue_id
from swarmq.client.episodes.client import EpisodeClient, EpisodeOptions
from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.client.runners.attempts import Agent, AgentFunction, AttemptResult, RunnerOptions, attempt, check_signature
from swarmq.client.runners.circuit_breaker import CircuitBreaker
from swarmq.client.runners.progress import Display
from swarmq.client.runners.report import RunSummary, Tally
from swarmq.errors import BrokerLostError, EpisodeError, TaskError, UnroutableError
from swarmq.messages import EpisodeBegin, Mode, Task, idempotency_key, new_id
from swarmq.outcome import make_unfinished_end
from swarmq.runtime.logs import log

LOCAL_ATTEMPTS = 2
"""Attempts at a task before it goes back to its queue, beside those that may fail by chance. Tasks of an environment that fails often would
otherwise go back one after the other, and their groups would wait for each other."""
EVAL_SHARE = 4
"""Number of training lanes per evaluation lane of a worker. Lanes are separate, so that neither mode keeps the other waiting."""
RETRY_SHARE = 4
"""Number of ordinary lanes per lane for returned tasks."""
MAX_SETTLED = 10_000
"""Maximum number of settled tasks that a worker remembers: if an acknowledgement was lost, the redelivered task
is not attempted again."""


class Worker:
    """Worker that attempts the tasks of one kind until it is stopped."""

    def __init__(
        self,
        client: EpisodeClient,
        function: AgentFunction,
        *,
        kind: str | None = None,
        mode: Mode = "train",
        options: RunnerOptions | None = None,
    ) -> None:
        self._client = client
        self._agent = Agent(function, loop=client.agent_loop)
        self._code_version = client.code_version_of(function)
        self._kind = client.resolve_kind(kind)
        self._mode = mode
        queue_of = topology.evals if mode == "eval" else topology.tasks
        self._queue = queue_of(client.invite.run, self._kind)
        self._retry_queue = topology.retries(client.invite.run, self._kind) if mode == "train" else None
        self._options = options = options or RunnerOptions()
        self._held: dict[str, Delivery] = {}
        """Key of a task that is being attempted -> its newest delivery."""
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._not_begun: set[asyncio.Task[None]] = set()
        self._tally = Tally()
        self._breaker = CircuitBreaker(
            lanes=options.concurrency, pause_s=options.retry_pause_s, serves=client.proxy_serves
        )

    async def run(self, stop: asyncio.Event) -> RunSummary:
        """Work until `stop` is set. Attempts that have begun are then finished, and all other tasks go back to the queue."""
        began, self._stop = time.monotonic(), stop
        log.info(
            "worker_ready",
            kind=self._kind,
            mode=self._mode,
            concurrency=self._options.concurrency,
            client=self._client.client_id,
        )
        interval_s = self._client.limits.progress_interval_s
        with Display(
            f"worker {self._kind}", total=None, shown=self._options.progress, interval_s=interval_s
        ) as self._display:
            async with self._open_sources() as sources, asyncio.TaskGroup() as attempts:
                taking = [attempts.create_task(self._take_deliveries(source, attempts)) for source in sources]
                await stop.wait()
                for waiting in (*taking, *self._not_begun):
                    waiting.cancel()
                log.info(
                    "worker_draining", kind=self._kind, mode=self._mode, attempts=len(self._held) - len(self._not_begun)
                )
        return self._tally.summary(time.monotonic() - began)

    @contextlib.asynccontextmanager
    async def _open_sources(self) -> AsyncIterator[list[Deliveries]]:
        consume = self._client.broker.consume
        async with contextlib.AsyncExitStack() as stack:
            sources = [await stack.enter_async_context(consume(self._queue, prefetch=self._options.concurrency))]
            if self._retry_queue:
                lanes = max(1, self._options.concurrency // RETRY_SHARE)
                with contextlib.suppress(UnroutableError):  # the run was begun by an older version, without this queue
                    sources.append(await stack.enter_async_context(consume(self._retry_queue, prefetch=lanes)))
            if sources[0].recycle_s < self._options.attempt_timeout_s:
                log.warning(
                    "attempts_may_be_repeated",
                    after_s=sources[0].recycle_s,
                    reason="this RabbitMQ redelivers a message that a worker has held for so long",
                    action="use RabbitMQ 3.12 or newer, or see docs/how-to/access.md",
                )
            yield sources

    async def _take_deliveries(self, deliveries: Deliveries, attempts: asyncio.TaskGroup) -> None:
        async for delivery in deliveries:
            key = idempotency_key(delivery.message)
            if not isinstance(delivery.message, Task):
                await self._dead_letter(delivery, f"{type(delivery.message).__name__} on a task queue")
            elif key in self._settled:
                await _ack(delivery)
            elif key in self._held:
                self._held[key] = delivery
            else:
                self._held[key] = delivery
                task = attempts.create_task(self._attempt(key, delivery.message))
                self._not_begun.add(task)

    async def _attempt(self, key: str, task: Task) -> None:
        this = asyncio.current_task()
        assert this is not None
        try:
            for made_here in itertools.count(1):
                if task.attempt:
                    await asyncio.sleep(self._breaker.retry_pause_s(task.attempt))
                await self._breaker.wait_for_turn()
                try:
                    ep = await self._begin(task)
                except (EpisodeError, TaskError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                    log.warning("task_refused", task=task.slot.id, reason=str(error))
                    reason = f"not a task that can be attempted: {error}"
                    await self._give_up(task, reason)
                    await self._dead_letter(self._held[key], reason)
                    return
                self._not_begun.discard(this)
                done = await attempt(self._client, ep, self._agent, timeout_s=self._options.attempt_timeout_s)
                self._breaker.record(finished=done.finished)
                following = msgspec.structs.replace(task, attempt=task.attempt + 1)
                again = not done.finished and following.attempt < self._options.max_attempts
                is_patient = made_here < LOCAL_ATTEMPTS + self._breaker.patience
                if not (again and is_patient) or self._stop.is_set():
                    await self._settle(key, task, done, following if again else None)
                    return
                self._tally.add(done)
                self._display.update(self._tally, done)
                self._not_begun.add(this)
                task = following
        finally:
            self._not_begun.discard(this)
            self._held.pop(key, None)

    async def _give_up(self, task: Task, reason: str) -> None:
        """Give a task up: publish the last, failed episode of its slot, so that neither its group nor its evaluation round
        waits for it."""
        begin = EpisodeBegin(
            run=self._client.invite.run,
            episode_id=new_id(),
            slot=task.slot,
            kind=task.kind,
            group_size=task.group_size or self._client.group_size_of(task.kind),
            policies=self._client.invite.policies,
            mode=task.mode,
            client_id=self._client.client_id,
            code_version=self._code_version,
            attempt=task.attempt,
        )
        for piece in (begin, make_unfinished_end(begin, "failed", reason, final=True)):
            await self._client.broker.publish(topology.inbox(begin.run), piece)

    async def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        with contextlib.suppress(BrokerLostError):  # it is redelivered and dead-lettered again
            await self._client.broker.dead_letter(delivery, reason)

    async def _begin(self, task: Task) -> AsyncEpisode:
        piece = SwarmTask(strip_queue_id(task.slot.task_id, task.kind), task.kind, msgspec.msgpack.decode(task.payload))
        options = EpisodeOptions(
            mode=task.mode,
            kind=task.kind,
            slot=task.slot,
            group_size=task.group_size,
            attempt=task.attempt,
            last_attempt=task.attempt + 1 >= self._options.max_attempts,
            code_version=self._code_version,
            lifetime_s=self._options.attempt_timeout_s,
        )
        return await self._client.begin(piece, options)

    async def _give_back(self, task: Task) -> None:
        """Return a task to the queue of returned tasks, which are attempted next."""
        try:
            await self._client.broker.publish(self._retry_queue or self._queue, task)
        except UnroutableError:
            await self._client.broker.publish(self._queue, task)

    async def _settle(self, key: str, task: Task, done: AttemptResult, following: Task | None) -> None:
        """After the end is confirmed, publish the `following` attempt if there is one, and then acknowledge the task."""
        if following:
            await self._give_back(following)
        self._settled[key] = None
        if len(self._settled) > MAX_SETTLED:
            self._settled.popitem(last=False)
        await _ack(self._held[key])
        self._tally.add(done)
        self._tally.slots += not following
        self._tally.given_up += not (following or done.finished)
        if not (following or done.finished):
            log.warning("task_given_up", task=task.slot.id, attempts=task.attempt + 1)
        self._display.update(self._tally, done)


def load_target(target: str) -> AgentFunction:
    """Load the agent's function that `module:function` names. Raises TaskError if there is none or its signature is wrong."""
    function: AgentFunction = load_object(target)
    check_signature(function)
    return function


async def _ack(delivery: Delivery) -> None:
    with contextlib.suppress(BrokerLostError):  # it is redelivered, and recognised
        await delivery.ack()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets. A second signal then has its default effect and kills the process."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def first() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
