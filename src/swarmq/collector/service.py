"""The collector's shell, which connects the core to the broker, the store and the clock.

  in ──batch──> intake ──┐  (turns.<n> as well)                 ┌──> emit, dead-letter
  timer ──1 s──> tick ───┼──> decide: core in one transaction ──┼──> acknowledge `in`
  depths ──5 s──> check ─┤                                      │
  confirms ──────────────┘          (never two at once)         └──> outgoing ──> sender ──> ready, tickets
     ^─────────────────────────────────────────────────────────────────────────────┘
  returned ──> give_back: sealed? ──> tasks.again, eval

The order is the promise: commit, then acknowledge; commit, then publish; confirm, then mark. In a run with standby collectors a
transaction is committed once it is valid in the log that they share (`decide/log.py`), so the next leader knows of everything that
was acknowledged or published. A crash between two of these steps causes a redelivery or a second publish, and both are
deduplicated. If the store cannot commit (disk full), nothing is acknowledged: the core is rebuilt from the store and decides the
same messages again, until the commit succeeds. Deleted queues are declared again here and nowhere else, after the commit that
schedules their lost content to be sent again.

With several processes, workers (`workers.py`) talk to the broker, and turns come through queues of their own. An end that does not name
its calls must not be decided before the turns that were recorded before it: it waits for a fence to pass each of these queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Protocol, TypeGuard, get_args

import msgspec
import structlog

from swarmq import keys
from swarmq.broker import Broker, Delivery, Depth, topology
from swarmq.collector.decide.assemble import StoredRollout, assemble_rollout
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.effects import (
    Close,
    Effect,
    Emit,
    Forward,
    IssueEval,
    IssueTicket,
    SaveFile,
    SendControl,
    SendDeadLetter,
    SendEvaluation,
)
from swarmq.collector.decide.log import LogPosition
from swarmq.collector.decide.state import Rules
from swarmq.collector.decide.tickets import LOST_S
from swarmq.collector.membership import MembershipKeeper
from swarmq.collector.report import NoTurnsWarnings, StandstillWatch, state_fields
from swarmq.collector.store import Store, encode_rows
from swarmq.collector.workers import Workers
from swarmq.config import SwarmJob
from swarmq.errors import (
    BrokerError,
    BrokerLostError,
    CollectorError,
    FencedError,
    UnconfirmedError,
    UnroutableError,
)
from swarmq.messages import (
    Command,
    EpisodeEnd,
    Event,
    EventName,
    Fence,
    Message,
    RefusedTurn,
    Registration,
    Rollout,
    Slot,
    Task,
    Ticket,
    Turn,
    decode,
    new_id,
)
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.files import read_if_exists
from swarmq.transcripts.writer import ClosedEpisode, TranscriptWriter

PREFETCH = 1000
BATCH = 500
"""Maximum number of messages in one transaction."""
WINDOW = 32
"""Maximum number of messages that a process publishes at the same time, which bounds the memory of outgoing rollouts."""
MAX_EVENTS = 100
"""Maximum number of events in one message."""
MAX_TURN_QUEUES = 32
DRAIN_S = 10.0

Step = Callable[[Core], Iterable[Effect]]
Outgoing = Forward | IssueTicket | IssueEval | SendControl | SendEvaluation
OUTGOING = frozenset(get_args(Outgoing))

log = structlog.get_logger()


class CollectorIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and time limits of a collector."""

    tick_s: float = 1.0
    """Seconds between two checks for deadlines that have passed."""
    check_s: float = 5.0
    """Seconds between two checks of the queues."""
    state_s: float = 2.0
    """Seconds between two `state` events."""
    retry_s: float = 2.0
    """Seconds until a transaction that the disk refused is tried again."""
    confirm_s: float = 30.0
    """Seconds that a message may stay unconfirmed before its queue is checked."""
    lost_s: float = LOST_S
    """Seconds that a ticket may be in no queue and unused before it is issued again."""


INTERVALS = CollectorIntervals()


class TransactionLog(Protocol):
    """What a leading collector needs of the log of a run with standby collectors (`standby.py`)."""

    @property
    def term(self) -> int: ...

    def check(self) -> None:
        """Raise FencedError if this collector no longer leads."""

    async def append(self, body: bytes) -> LogPosition:
        """Append a transaction, and return its position once it is valid. Raises FencedError if it is not."""
        ...

    async def answer_joins(self) -> None:
        """Append a copy of the store for every standby that has requested one."""


class Collector:
    """The collector of one run; call `run` once."""

    def __init__(
        self,
        job: SwarmJob,
        broker: Broker,
        store: Store,
        *,
        transcripts: TranscriptWriter | None = None,
        log: TransactionLog | None = None,
        workers: Workers | None = None,
        clock: Callable[[], float] = time.time,
        intervals: CollectorIntervals = INTERVALS,
    ) -> None:
        """`transcripts`: records every closed episode; None records nothing. `log`: the log of a run with standby collectors.
        `workers`: processes that consume and publish episodes; None: this process does."""
        self.job = job
        self._rules = Rules.of(job)
        self._proxies = ProxyRegistry(job.run_folder.proxies)
        self._members = MembershipKeeper(job, broker, clock=clock)
        self._broker = broker
        self._store = store
        self._transcripts = transcripts
        self._log = log
        self._workers = workers
        store.keeps_bodies = transcripts is not None
        self._closed: list[ClosedEpisode] = []
        """Episodes closed by committed transactions that the transcript writer has not received yet."""
        self._clock = clock
        self._intervals = intervals
        self._core: Core | None = None
        self._deciding = asyncio.Lock()
        self._outgoing: deque[Outgoing] = deque()
        self._confirmed: list[Outgoing] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._events: deque[Emit] = deque()
        self._no_turns = NoTurnsWarnings()
        self._restoring = asyncio.Lock()
        self._reviving = asyncio.Lock()
        self._turns: list[str] = []
        """Queues of turns."""
        self._queues: frozenset[str] = frozenset()
        """All queues of the run."""
        self._fences: dict[str, asyncio.Event] = {}
        """Id of a fence that is on its way -> set when it has passed."""
        self.commit_watchers: list[Callable[[float], None]] = []
        """Functions to call with the duration of each transaction in seconds."""

    async def run(self, stop: asyncio.Event) -> None:
        """Collect until `stop` is set, then finish the work in hand within DRAIN_S."""
        try:
            await self._run(stop)
        finally:
            self._hand_over()  # also of a collector that has lost a worker or no longer leads

    async def _run(self, stop: asyncio.Event) -> None:
        await self._find_queues()
        await self._restore(at_start=True)
        # Send the control state again: a power loss may have damaged the file in which a learner keeps it.
        controls = [topology.control(self.job.run, policy) for policy in self._rules.trained]
        # A learner refuses late rollouts of a former leader, so this leader sends all rollouts again.
        rollouts = [topology.ready(self.job.run, policy) for policy in self._rules.trained] if self._log else []
        await self._decide(lambda core: core.resend_lost([*controls, *rollouts]))
        self._outgoing.clear()
        self._send(self._store.outbox())
        log.info("collecting", **state_fields(self._load_core()))
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(self._sender())
            others = [
                *(
                    tasks.create_task(self._intake(queue, self._workers or self._broker))
                    for queue in (topology.inbox(self.job.run), *self._turns)
                ),
                tasks.create_task(self._intake(topology.control(self.job.run), self._broker)),
                tasks.create_task(self._give_back()),
                tasks.create_task(self._ticker()),
                tasks.create_task(self._watch_queues()),
                tasks.create_task(self._reporter()),
                tasks.create_task(self._listen()),
                tasks.create_task(self._members.run()),
            ]
            await stop.wait()
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._idle.wait()
            sender.cancel()
        await self._decide(lambda _: [])
        self._hand_over()
        await self._emit_event("state", self.read_state())
        log.info("stopped", unsent=len(self._outgoing), **state_fields(self._load_core()))

    @property
    def num_outgoing(self) -> int:
        """Number of decided messages that the broker has not confirmed."""
        return len(self._outgoing)

    def read_state(self) -> dict[str, Any]:
        """Return the fields of the `state` event."""
        fields = state_fields(self._load_core())
        return {**fields, "transcripts_lost": self._transcripts.lost} if self._transcripts else fields

    # ---------------------------------------------------------------------------------------------- loops

    async def _find_queues(self) -> None:
        """List the run's queues. A run that had more processes before may have left turns in its queues."""
        possible = topology.list_turns(self.job.run, MAX_TURN_QUEUES)
        left = await self._broker.depths(possible)
        num = max(self.job.collector.turn_queues, *(possible.index(queue) + 1 for queue in left), 0)
        self._turns = possible[:num]
        self._queues = frozenset(
            topology.run_queues(self.job.run, policies=self._rules.trained, kinds=self.job.task_kinds, turn_queues=num)
        )

    async def _intake(self, queue: str, source: Broker | Workers) -> None:
        while True:
            try:
                async with source.consume(queue, prefetch=PREFETCH) as deliveries:
                    while batch := await deliveries.batch(BATCH):
                        await self._await_turns(batch)
                        refused = await self._take(batch)
                        with contextlib.suppress(BrokerLostError):  # redeliveries change nothing
                            for delivery, reason in refused:
                                log.warning("message_refused", reason=reason)
                                await source.dead_letter(delivery, reason)
                            await deliveries.ack_through(batch[-1])
                        await self._emit_pending()
                    return
            except UnroutableError:
                await self._restore()

    async def _await_turns(self, batch: list[Delivery]) -> None:
        """Return once all turns are decided that were recorded before the ends in the batch. Ends that name their calls are left out: the
        core waits for these calls."""
        if self._turns and any(isinstance(one.message, EpisodeEnd) and one.message.calls is None for one in batch):
            async with asyncio.TaskGroup() as tasks:
                for queue in self._turns:
                    tasks.create_task(self._pass_fence(queue))

    async def _pass_fence(self, queue: str) -> None:
        """Send a fence through a queue of turns, and return when everything before it is decided."""
        fence = Fence(run=self.job.run, fence_id=new_id())
        passed = self._fences[fence.fence_id] = asyncio.Event()
        try:
            while not passed.is_set():
                await self._publish_message(queue, fence)
                with contextlib.suppress(TimeoutError):  # the fence is lost if the queue is deleted
                    async with asyncio.timeout(self._intervals.confirm_s):
                        await passed.wait()
        finally:
            del self._fences[fence.fence_id]

    async def _take(self, batch: list[Delivery]) -> list[tuple[Delivery, str]]:
        """Decide a batch and return the deliveries to dead-letter, with reasons.

        A message on which the core fails is a bug in swarmq. It is isolated and dead-lettered: if the process died of it, the
        whole batch would be redelivered again and again, until RabbitMQ dead-letters all of it.
        """
        try:
            return await self._take_together(batch)
        except (FencedError, BrokerError):
            raise
        except Exception as error:
            if len(batch) == 1:
                log.exception("message_broke_the_collector", key=batch[0].key)
                return await self._give_up(batch[0], f"the collector failed on it: {error!r}")
        return [refusal for delivery in batch for refusal in await self._take([delivery])]

    async def _give_up(self, delivery: Delivery, reason: str) -> list[tuple[Delivery, str]]:
        """Report to the core that a message of an episode is missing, and return the deliveries to dead-letter."""
        turn = delivery.message
        if not isinstance(turn, Turn):
            return [(delivery, reason)]
        refused = RefusedTurn(run=turn.run, episode_id=turn.episode_id, call_id=turn.call_id, reason=reason)
        return await self._take([Delivery(delivery.arrival, refused)])

    async def _take_together(self, batch: list[Delivery]) -> list[tuple[Delivery, str]]:
        refused: list[tuple[Delivery, str]] = []

        def decide(core: Core) -> Iterator[Effect]:
            refused.clear()
            now, control = self._clock(), topology.control(self.job.run)
            for delivery in batch:
                kind = type(delivery.message)
                if kind in (Registration, Fence):
                    continue
                if (delivery.arrival.queue == control) != (kind in (Command, Task)):
                    refused.append((delivery, f"{kind.__name__} on {delivery.arrival.queue}"))
                    continue
                for effect in core.take(delivery.message, delivery.body, now):
                    if type(effect) is SendDeadLetter:
                        refused.append((delivery, effect.reason))
                    yield effect

        await self._decide(decide)
        for delivery in batch:
            if type(delivery.message) is Fence and (passed := self._fences.get(delivery.message.fence_id)):
                passed.set()
            if type(delivery.message) is Registration:
                self._members.take(delivery.message, topology.parse_host(delivery.arrival.sender))
        return refused

    async def _listen(self) -> None:
        """Handle the run's events: refused model calls, and requests for the membership."""
        senders = ("proxy", "host")  # its own events are the most, and it needs none of them
        async with self._broker.events(self.job.run, senders=senders, on_gap=self._members.reset_silence) as events:
            async for event in events:
                self._members.record_event(event.source)
                if event.name == "refused":
                    self._no_turns.note_refusal(event.fields)
                elif event.name == "members_wanted":
                    await self._emit_event("state", self.read_state())  # first, so that changed settings are known, too
                    self._members.answer(str(event.fields["ask"]))

    async def _give_back(self) -> None:
        """Requeue tasks that invited clients give back. A crash after the confirm does this twice, which is harmless: the
        first winner of a slot counts."""
        while True:
            try:
                async with self._broker.consume(topology.returned_tasks(self.job.run), prefetch=WINDOW) as deliveries:
                    async for delivery in deliveries:
                        with contextlib.suppress(BrokerLostError):
                            await self._give_back_one(delivery)
                    return
            except UnroutableError:
                await self._restore()

    async def _give_back_one(self, delivery: Delivery) -> None:
        task = delivery.message
        if not isinstance(task, Task) or not self._is_ours(task):
            reason = f"{delivery.arrival.sender or 'a client'} gave back a task that differs from the one that was fed"
            log.warning("message_refused", reason=reason)
            await self._broker.dead_letter(delivery, reason)
            return
        queue_of = topology.evals if task.mode == "eval" else topology.retries
        await self._broker.publish(queue_of(self.job.run, task.kind), task)
        await delivery.ack()

    def _is_ours(self, task: Task) -> bool:
        secret = self._task_secret()
        return secret is not None and task.kind in self.job.task_kinds and keys.is_sealed(secret, task)

    def _task_secret(self) -> bytes | None:
        """Return the secret of task seals, or None while the run has none, because no client is invited yet."""
        path = self.job.run_folder.root_secret
        return keys.derive_task_secret(keys.load_root(path)) if path.exists() else None

    async def _ticker(self) -> None:
        while True:
            await asyncio.sleep(self._intervals.tick_s)
            await self._decide(lambda core: [*core.tick(self._clock()), *self._changed_files()])
            await self._emit_pending()

    def _changed_files(self) -> list[Effect]:
        """Return effects that store the registries which have changed since standby collectors got them."""
        if self._log is None:
            return []
        files = [SaveFile(path.name, read_if_exists(path)) for path in self.job.run_folder.registries]
        return [file for file in files if file.body != self._store.file(file.name)]

    async def _watch_queues(self) -> None:
        while True:
            await asyncio.sleep(self._intervals.check_s)
            await self._check_queues()

    async def _check_queues(self) -> None:
        """Detect queues that were deleted or emptied."""
        depths = await self._restore()
        if not self._outgoing and not any(
            depths[queue].ready for queue in (topology.inbox(self.job.run), *self._turns)
        ):
            kinds = {kind: topology.tickets(self.job.run, kind) for kind in self.job.task_kinds}
            waiting = {kind: depths[queue].ready for kind, queue in kinds.items()}
            lost_s = self._intervals.lost_s
            await self._decide(lambda core: core.check_tickets(waiting, self._clock(), lost_s=lost_s))

    async def _sender(self) -> None:
        """Publish decided messages in order, a window at a time."""
        most = WINDOW * (len(self._workers) if self._workers else 1)
        while True:
            if not self._outgoing:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            window = list(islice(self._outgoing, most))
            async with asyncio.TaskGroup() as tasks:
                for item in window:
                    tasks.create_task(self._publish(item))
            for _ in window:
                self._outgoing.popleft()
            self._confirmed += window

    async def _reporter(self) -> None:
        watch = StandstillWatch()
        while True:
            await asyncio.sleep(self._intervals.state_s)
            core = self._load_core()
            await self._emit_event("state", self.read_state())
            for text in self._transcripts.warnings() if self._transcripts else ():
                await self._emit_event("warning", {"text": f"collector: {text}"})
            for line in watch.find_warnings(core, self._clock()):
                log.warning("no_progress", reason=line)
                await self._emit_event("warning", {"text": line, "kind": "stall"})

    # ------------------------------------------------------------------------------------------- deciding

    async def _decide(self, step: Step) -> None:
        """Run `step` on the core in one transaction, with the confirms so far; repeat until the transaction is committed."""
        async with self._deciding:
            while True:
                try:
                    if self._log:
                        self._log.check()
                        await self._log.answer_joins()
                    await _finish(self._commit(step))
                    return
                except CollectorError as error:
                    self._core = None
                    await self._wait_for_store(error)
                except BaseException:
                    self._core = None  # the core may be ahead of the store
                    raise

    async def _wait_for_store(self, error: CollectorError) -> None:
        log.warning("store_unavailable", reason=str(error), retry_s=self._intervals.retry_s)
        await self._emit_event("warning", {"text": f"collector: {error}; trying again, nothing is lost"})
        await asyncio.sleep(self._intervals.retry_s)

    async def _commit(self, step: Step) -> None:
        core, began = self._load_core(), time.perf_counter()
        confirmed = list(self._confirmed)
        effects: list[Effect] = []
        closed: list[ClosedEpisode] = []
        now = self._clock()
        position: LogPosition | None = None
        try:
            with self._store.transaction():
                for effect in chain(_confirms(core, confirmed), step(core), _settle(core)):
                    if self._transcripts and type(effect) is Close and (episode := self._store.closed(effect, now)):
                        closed.append(episode)
                    self._store.write(effect)  # at once, because decisions on the next message read the store
                    effects.append(effect)
                self._hand_over()  # of earlier transactions: the thread works on them while this one waits for the disk
                if self._log and (body := encode_rows(effects)):
                    position = await self._log.append(body)
                    self._store.save_position(position)
        except CollectorError as error:
            if position is None:
                raise
            # It is valid in the log, so it must not be decided again.
            await self._commit_again(effects, position, error)
        self._closed = closed
        for watch in self.commit_watchers:
            watch(time.perf_counter() - began)
        del self._confirmed[: len(confirmed)]
        self._send(effects)
        self._events += [effect for effect in effects if type(effect) is Emit]

    async def _commit_again(self, effects: list[Effect], position: LogPosition, error: CollectorError) -> None:
        """Repeat the commit of a transaction that is in the log."""
        while True:
            await self._wait_for_store(error)
            try:
                with self._store.transaction():
                    for effect in effects:
                        self._store.write(effect)
                    self._store.save_position(position)
                return
            except CollectorError as again:
                error = again

    def _hand_over(self) -> None:
        """Pass the episodes that committed transactions closed to the transcript writer."""
        if self._transcripts and self._closed:
            self._transcripts.offer(self._closed)
            self._closed = []

    def _load_core(self) -> Core:
        """Return the core, built from the store at the start and after a failed commit."""
        if self._core is None:
            self._core = Core(self._rules, self._store, self._store.snapshot(), now=self._clock(), job=self.job)
        return self._core

    # -------------------------------------------------------------------------------------------- talking

    def _send(self, effects: list[Effect]) -> None:
        self._outgoing += [effect for effect in effects if _is_outgoing(effect)]
        if self._outgoing:
            self._idle.clear()
            self._wake.set()

    async def _publish(self, item: Outgoing) -> None:
        """Publish an item and return once the broker has confirmed it, or a learner has reported on it meanwhile."""
        # With a log, a transaction stays open until it is read back; its messages must not be published before.
        async with self._deciding if self._log else contextlib.nullcontext():
            queue, message = self._build(item)
        if message is not None:
            await self._publish_message(queue, message)

    async def _publish_message(self, queue: str, message: Message | StoredRollout) -> None:
        """Publish a message, and return once the broker has confirmed it. Declare its queue again if it is missing."""
        while True:
            try:
                if self._workers:
                    await self._workers.publish(queue, message, deadline_s=self._intervals.confirm_s)
                else:
                    assert not isinstance(message, StoredRollout)
                    await self._broker.publish(queue, message, deadline_s=self._intervals.confirm_s)
                return
            except UnroutableError:
                await self._restore()
            except UnconfirmedError:  # the broker is away or full, or cannot bring the queue up
                if queue not in self._turns:
                    await self._revive(queue)

    def _build(self, item: Outgoing) -> tuple[str, Message | StoredRollout | None]:
        """Return an item's queue and message. The message is None if a learner has reported on it in the meantime."""
        message: Message | StoredRollout | None
        if isinstance(item, IssueTicket):
            queue = topology.tickets(self.job.run, item.kind)
            size = self._load_core().rules.size_of(item.kind)
            message = Ticket(
                run=self.job.run,
                ticket_id=item.ticket_id,
                kind=item.kind,
                group_size=size,
                proxies=self._proxies.urls(),
            )
        elif isinstance(item, SendControl):
            queue = topology.control(self.job.run, item.policy)
            message = self._store.control()
        elif isinstance(item, SendEvaluation):
            queue = topology.control(self.job.run, item.policy)
            message = decode(item.body)
        elif isinstance(item, IssueEval):
            queue = topology.evals(self.job.run, item.kind)
            message = build_eval_task(self._store, item, run=self.job.run, secret=self._task_secret())
        else:
            queue = topology.ready(self.job.run, item.policy)
            build = read_rollout if self._workers else build_rollout
            message = build(self._store, item, term=self._log.term if self._log else 0)
        return queue, message

    async def _emit_pending(self) -> None:
        while self._events:
            emits = [self._events.popleft() for _ in range(min(MAX_EVENTS, len(self._events)))]
            await self._emit(*emits)
            for emit in emits:
                if emit.name == "episode" and (line := self._no_turns.check(emit.fields, self._clock())):
                    log.warning("no_turns", reason=line)
                    await self._emit_event("warning", {"text": line})

    async def _emit_event(self, name: EventName, fields: Mapping[str, Any]) -> None:
        await self._emit(Emit(name, fields))

    async def _emit(self, *emits: Emit) -> None:
        now = self._clock()
        events = [
            Event(run=self.job.run, source="collector", name=one.name, at=now, fields=dict(one.fields)) for one in emits
        ]
        await (self._workers or self._broker).emit(*events)

    async def _revive(self, queue: str) -> None:
        """Delete a queue that RabbitMQ could not recover and declare it again. Only the collector fills such queues, so it
        can send the content again."""
        async with self._reviving:  # one at a time, or the second call deletes what the first declares
            if await self._broker.delete_if_dead(queue):
                log.warning(
                    "queue_dead", queue=queue, reason="RabbitMQ could not bring it up after a crash; see its log"
                )
                await self._restore()

    async def _restore(self, *, at_start: bool = False) -> dict[str, Depth]:
        """Declare missing queues again, schedule their lost content, and return the depths of all queues."""
        async with self._restoring:
            depths = await self._broker.depths(sorted(self._queues))
            if gone := self._queues - depths.keys():
                await self._decide(
                    lambda core: core.resend_lost(gone)
                )  # before declaring: a crash in between would hide the loss
                await self._broker.declare(
                    self.job.run,
                    policies=self._rules.trained,
                    kinds=self.job.task_kinds,
                    replicas=self.job.broker.replicas,
                    turn_queues=len(self._turns),
                )
                if not at_start:
                    names = ", ".join(sorted(gone))
                    text = f"collector: {names} had been deleted; declared again, and all known content is sent again"
                    log.warning("queues_deleted", queues=names)
                    await self._emit_event("warning", {"text": text})
            return dict.fromkeys(gone, Depth(0, 0)) | depths


def build_rollout(store: Store, item: Forward, *, term: int = 0) -> Rollout | None:
    """Build the rollout of an outbox row, or return None if a learner has already reported on it."""
    parts = store.parts(item.episode_id)
    if not parts:
        return None
    return assemble_rollout(item.policy, *parts, group_members=item.group_members, term=term)


def read_rollout(store: Store, item: Forward, *, term: int = 0) -> StoredRollout | None:
    """Read the rollout of an outbox row for a worker that assembles it, or return None if a learner has already reported on it."""
    bodies = store.bodies(item.episode_id)
    if bodies is None:
        return None
    begin, end, *_ = bodies.row
    return StoredRollout(item.policy, item.group_members, term, begin, end, bodies.turns)


def build_eval_task(store: Store, item: IssueEval, *, run: str, secret: bytes | None = None) -> Task | None:
    """Build the sealed task of an evaluation row, or return None if its task is gone."""
    payload = store.payload((slot := msgspec.msgpack.decode(item.slot, type=Slot)).task_id)
    if payload is None:
        return None
    task = Task(run=run, slot=slot, kind=item.kind, group_size=1, mode="eval", payload=msgspec.Raw(payload))
    return keys.seal_task(secret, task) if secret else task


def _is_outgoing(effect: Effect) -> TypeGuard[Outgoing]:
    # a twentieth of the time of `isinstance`, and there are thirty effects for an episode
    return type(effect) in OUTGOING


def _confirms(core: Core, items: list[Outgoing]) -> Iterator[Effect]:
    for item in items:
        if isinstance(item, IssueTicket):
            yield from core.confirm_ticket(item.ticket_id)
        elif isinstance(item, SendControl):
            yield from core.confirm_control(item.policy, item.number)
        elif isinstance(item, SendEvaluation):
            yield from core.confirm_evaluation(item.policy, item.began_at)
        elif isinstance(item, IssueEval):
            yield from core.confirm_eval(item.slot_id)
        else:
            yield from core.confirm_forward(item.episode_id, item.policy)


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end, and only then raise a cancellation that came in between: a transaction that was appended to the log
    may be valid, so it must also be committed."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def _settle(core: Core) -> Iterator[Effect]:
    """Settle the core, as the last decision of a transaction. It is a generator so that it runs after the effects before it
    are written."""
    yield from core.settle()
