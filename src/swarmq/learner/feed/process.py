"""The batch feeder: the learner's broker side, a process of its own without torch, so that heartbeats never wait for a step.

  ready ──> consume ──> batcher ─┐                          ┌──> trainer (socket)
                                 ├─ log.append ─ ack ─ send ┘
  trainer: RequestBatch ─────────┘
  <policy>.control ──> control state on disk ─ ack ─ from the next batch on
                   └─> evaluation results on disk ─ ack ─ offered to the trainer until its trackers have them
  trainer: StepDone ──> report ──> StepReport on `in`; step event       tick ──> state event, watchdog

The order is a promise: a record is on disk before its messages are acknowledged, and they are acknowledged before it is trained.
A record is reported on `in` once its step is done. The file `reported` holds the number up to which reports are confirmed, so a
restart repeats at most a few reports and forgets none. Queues may be deleted or emptied: if the trainer waits and no rollout
arrives, the last reports are repeated and the collector is asked to publish unreported rollouts again. This process ends when the
trainer is gone; rollouts that are not in the log were not acknowledged, so they are redelivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from swarmq.broker import Broker, Delivery, topology
from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s
from swarmq.config import resolve_amqp_url
from swarmq.errors import BrokerLostError, LearnerError, MissingExtraError, SetUpError, SwarmqError, UnroutableError
from swarmq.learner.demonstrations import draw_demonstrations
from swarmq.learner.feed import frames
from swarmq.learner.feed.batch_summary import batch_metrics
from swarmq.learner.feed.batcher import Batcher
from swarmq.learner.feed.control_state import ControlState
from swarmq.learner.feed.evaluations import WaitingEvaluations
from swarmq.learner.feed.step_events import StepEvents
from swarmq.learner.health.signs import SignWatch
from swarmq.learner.methods import registry
from swarmq.learner.store import records
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.durable_files import DiskFullError, map_os_errors
from swarmq.learner.store.records import BatchIndex, BatchRecord, Hello, RunIdentity
from swarmq.learner.store.report_offsets import ReportOffsets
from swarmq.learner.store.writer_lock import Fence, hold_lock
from swarmq.messages import Control, Evaluation, Event, EventName, Rollout, StepReport
from swarmq.runtime import logs
from swarmq.runtime.metrics_page import serve_metrics
from swarmq.runtime.wording import count_of

if TYPE_CHECKING:
    from swarmq.learner.feed.metrics import LearnerMetrics

log = structlog.get_logger()

PREDECESSOR_S = 15.0
"""Maximum number of seconds to wait for the batch feeder of a killed trainer to end."""
MAX_PREFETCH = 65535
CHUNK = 256

OpenBroker = Callable[[Hello], AbstractAsyncContextManager[Broker]]
NextMessage = Callable[[], Awaitable[records.ToIO]]
T = TypeVar("T")


def open_amqp(hello: Hello) -> AbstractAsyncContextManager[Broker]:
    """Open the broker, waiting while it is unreachable; at the first start only briefly, because its address may be wrong."""
    url = resolve_amqp_url(hello.job.broker)
    if url is None:
        raise LearnerError(
            "no broker is configured: set broker.url or $SWARMQ_AMQP_URL, or start the run with `swarmq up`"
        )
    name = f"learner {hello.job.run}.{hello.policy}"
    return AmqpBroker.open(url, name=name, deadline_s=None if hello.again else initial_connect_timeout_s())


def main(open_broker: OpenBroker = open_amqp, *, feeder_type: type[BatchFeeder] | None = None) -> None:
    """Run the process; its last argument is the file descriptor of the socket to the trainer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the trainer sends Stop, and its death closes the socket
    with contextlib.suppress(EOFError):
        asyncio.run(_run(socket.socket(fileno=int(sys.argv[-1])), open_broker, feeder_type or BatchFeeder))


async def _run(sock: socket.socket, open_broker: OpenBroker, feeder_type: type[BatchFeeder]) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    hello = await frames.read(reader)
    assert isinstance(hello, Hello)
    logs.configure(role=f"learner-io.{hello.policy}", run=hello.job.run)
    folder = hello.job.run_folder.batch_log(hello.policy)
    try:
        with map_os_errors(folder), hold_lock(folder / "lock", wait_s=PREDECESSOR_S):
            async with asyncio.TaskGroup() as tasks:
                messages: asyncio.Queue[records.ToIO] = asyncio.Queue()
                listening = tasks.create_task(_listen(reader, messages))
                async with open_broker(hello) as broker:
                    feeder = feeder_type(hello, folder, broker, writer)
                    async with _serve_metrics(feeder):
                        await feeder.run(messages.get)
                listening.cancel()
    except* EOFError:
        log.info("trainer_ended")
    except* SwarmqError as group:
        errors = list(_leaves(group))
        for_good = any(isinstance(error, SetUpError) for error in errors)
        with contextlib.suppress(ConnectionError):
            await frames.write(writer, records.FeederFailed(text="; ".join(map(str, errors)), for_good=for_good))
    finally:
        writer.close()


def _serve_metrics(feeder: BatchFeeder) -> AbstractAsyncContextManager[None]:
    """Return a context that serves the learner's metrics, if the settings name a port."""
    settings = feeder.job.metrics
    if not (port := settings.learner_ports.get(feeder.policy, 0)):
        return contextlib.nullcontext()
    try:
        from swarmq.learner.feed.metrics import LearnerMetrics  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtraError(f"metrics.learner_ports needs {error.name}: pip install 'swarmq[learner]'") from error
    feeder.metrics = LearnerMetrics(feeder.policy)
    return serve_metrics(settings.host, port, feeder.metrics.page)


async def _listen(reader: asyncio.StreamReader, messages: asyncio.Queue[records.ToIO]) -> None:
    """Queue the trainer's messages. When the trainer ends (EOFError), this process ends, even while it waits for the broker."""
    while True:
        messages.put_nowait(await frames.read(reader))


class StoppedError(Exception):
    """Signal that the trainer asked to stop and all reports are sent; ends the task group."""


class FeederIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and time limits of a batch feeder."""

    state_s: float = 2.0
    """Seconds between two `state` events."""
    stuck_s: float = 60.0
    """Seconds that the trainer waits for a batch before a warning says what is missing."""
    ask_s: float = 20.0
    """Seconds without a rollout after which the collector is asked to repeat lost messages."""
    retry_s: float = 2.0
    """Seconds between two attempts at an operation that the broker or the disk refuses."""
    drain_s: float = 10.0
    """Maximum number of seconds that a stop waits for confirmation of reports; the next start sends the rest."""


INTERVALS = FeederIntervals()


class BatchFeeder:
    """Moves rollouts from the queue to the log and to the trainer, and sends reports to the collector."""

    def __init__(
        self,
        hello: Hello,
        folder: Path,
        broker: Broker,
        writer: asyncio.StreamWriter,
        *,
        intervals: FeederIntervals = INTERVALS,
    ) -> None:
        job, policy = hello.job, hello.policy
        self.job, self.policy, self.broker, self.writer = job, policy, broker, writer
        self.intervals = intervals
        self.fence = Fence(folder / "lock")
        self.log = BatchLog(folder, RunIdentity.of(job, policy), needed=hello.version)
        registry.look_in(job.methods_folder)
        registry.adopt(hello.methods)
        self.demonstrations = hello.demonstrations
        self.control = ControlState(folder / "control", job, policy)
        self.evaluations = WaitingEvaluations(folder / "evaluations")
        self.offered: float | None = None
        """Start time of the evaluation round that was sent to the trainer and is not logged yet; None if there is none."""
        self.steps = StepEvents(job.run_folder.events, broker)
        self.reports = ReportOffsets(folder / "reported", self.log)
        self.version = hello.version
        self.replay = self.log.after(hello.version)
        self.model_limits: dict[str, Any] = {
            "vocab_size": hello.vocab_size,
            "max_length": hello.max_length,
            "routing": hello.routing,
        }
        self.intake = Batcher(self.control.limits(**self.model_limits), self.log.indices)
        self.unacked: dict[str, Delivery] = {}
        self.phase = "waiting"
        self.metrics: LearnerMetrics | None = None
        """The metrics for Prometheus, if they are served."""
        self.figures = dict[int, dict[str, Any]]()
        """Version -> metrics of the batch that was sent to the trainer."""
        self.signs = SignWatch()
        self.wanted_since: float | None = None
        """Monotonic time of the trainer's request for a batch; None while the trainer has a batch."""
        self.controls_due = 0
        """Number of control states that were queued when this process began and are still unread; one of them may raise the last
        step."""
        self.last_rollout_at = time.monotonic()
        """Monotonic time at which the last rollout arrived that was not a redelivery."""
        self.asked_collector = False
        """Whether the collector was asked for lost rollouts since the last one arrived."""
        self.serving = asyncio.Lock()
        self.reporting = asyncio.Lock()
        self.reports_due = asyncio.Event()
        self.reports_due.set()

    async def run(self, next_message: NextMessage) -> None:
        """Run until the trainer asks to stop. `next_message`: returns the trainer's next message."""
        await self.broker.declare(
            self.job.run, policies=[self.policy], kinds=self.job.task_kinds, replicas=self.job.broker.replicas
        )
        queue = topology.control(self.job.run, self.policy)
        self.controls_due = (await self.broker.depths([queue]))[queue].ready
        await self._offer_evaluation()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_trainer(next_message))
                tasks.create_task(self._consume_rollouts())
                tasks.create_task(self._consume_control())
                tasks.create_task(self._report())
                tasks.create_task(self._tick())
        except* StoppedError:
            await frames.write(self.writer, records.Stopped())
        finally:
            self.log.close()

    async def _follow_trainer(self, next_message: NextMessage) -> None:
        while True:
            match await next_message():
                case records.RequestBatch():
                    self.wanted_since = time.monotonic()
                    await self._serve()
                    if self.wanted_since is not None:
                        await frames.write(self.writer, records.QueueEmpty())
                case records.StepDone() as done:
                    await self._finish_step(done)
                case records.EvaluationLogged(began_at=began_at):
                    await self._retry_until_room(partial(self.evaluations.mark_logged, began_at))
                    self.offered = None
                    await self._offer_evaluation()
                case records.PhaseChange(phase=phase):
                    self.phase = phase
                    await self._emit_state()
                case records.Warn(text=text):
                    await self._emit("warning", {"text": text})
                case records.CheckpointSaved(oldest=oldest, asked=asked):
                    if not self.control.train.keep_batches:
                        self.fence.check()
                        spare = self.intake.limits.num_known
                        self.log.prune(oldest, reported=self.reports.through, spare=spare)
                    if asked:
                        await self._retry_until_room(partial(self.control.record_checkpoints, asked))
                        await self._emit("control", self.control.answer(self.next_step) | {"checkpoint": self.version})
                case records.Stop():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self.intervals.drain_s):
                            await self._publish_due()
                    self.phase = "ended"
                    await self._emit_state()
                    raise StoppedError
                case Hello():
                    raise AssertionError("the trainer sent a second hello")

    @property
    def next_step(self) -> int:
        """First step whose batch is not in the log."""
        return max(self.version, self.log.version) + 1

    async def _consume_control(self) -> None:
        """Store, apply and acknowledge control states, and report them as events; they take effect from the next batch on. Store
        evaluation results and offer them to the trainer."""
        queue = topology.control(self.job.run, self.policy)
        async with self.broker.consume(queue, prefetch=CHUNK) as deliveries:
            async for delivery in deliveries:
                state = delivery.message
                self.controls_due -= 1
                if isinstance(state, Evaluation) and state.run == self.job.run:
                    await self._retry_until_room(partial(self.evaluations.add, state))
                    await _ack([delivery])
                    await self._offer_evaluation()
                    await self._serve()
                    continue
                if not isinstance(state, Control) or state.run != self.job.run:
                    await self.broker.dead_letter(delivery, f"{type(state).__name__} on a learner's control queue")
                    continue
                if await self._retry_until_room(partial(self.control.take, state)):
                    self.intake.change(self.control.limits(**self.model_limits))
                    log.info("control", number=state.number, pace=state.pace, changes=len(state.changes))
                if state.number == self.control.state.number and state.command_id and not self.control.checkpoint_due:
                    await self._emit("control", self.control.answer(self.next_step))
                await _ack([delivery])
                await self._serve()

    async def _offer_evaluation(self) -> None:
        """Send the trainer the oldest results that trackers do not have; only one round at a time, so that a trainer in a long
        step never blocks this process."""
        if self.offered is None and (evaluation := self.evaluations.first):
            self.offered = evaluation.began_at
            await frames.write(self.writer, records.EvaluationReady(evaluation=evaluation))

    async def _consume_rollouts(self) -> None:
        # The collector's window bounds the number of rollouts; a smaller bound here could keep a batch from filling.
        queue = topology.ready(self.job.run, self.policy)
        async with self.broker.consume(queue, prefetch=MAX_PREFETCH) as deliveries:
            while chunk := await deliveries.batch(CHUNK):
                for delivery in chunk:
                    await self._accept(delivery)
                for text in self.intake.news():
                    log.warning("episode_dropped", reason=text)
                    await self._emit(
                        "warning",
                        {"text": f"learner {self.policy}: {text}; further drops for this reason are only counted"},
                    )
                await self._serve()

    async def _accept(self, delivery: Delivery) -> None:
        episode = delivery.message
        if not isinstance(episode, Rollout) or (episode.run, episode.policy) != (self.job.run, self.policy):
            await self.broker.dead_letter(delivery, f"not an episode of {self.job.run}.{self.policy}")
        elif self.intake.accept(episode):
            before, self.unacked[episode.episode_id] = self.unacked.get(episode.episode_id), delivery
            if before is None:
                self.last_rollout_at, self.asked_collector = time.monotonic(), False
            else:
                await _ack([before])  # the redelivery replaces it
        else:
            await _ack([delivery])

    async def _serve(self) -> None:
        """Log drops, and send a batch if the trainer waits and a batch is full."""
        async with self.serving:
            limit = self.control.train.max_steps
            if self.wanted_since is None:
                await self._record_drops()
            elif replayed := next((record for record in self.replay if record.index.version > self.version), None):
                await self._hand_over(replayed, replayed=True)
            elif self.control.checkpoint_due:
                await self._send_to_trainer(records.SaveCheckpoint(asked=self.control.state.checkpoints))
            elif limit and self.version >= limit:
                if self.controls_due <= 0:
                    await self._send_to_trainer(records.TrainingDone())
            elif self.control.state.pace != "paused" and (
                record := self.intake.take(version=self.version, at=time.time(), settings=self.control.train)
            ):
                record = self._complete(record)
                await self._commit(record)
                await self._hand_over(record, replayed=False)
            else:
                await self._record_drops()

    def _complete(self, record: BatchRecord) -> BatchRecord:
        """Add what the step needs besides its episodes: the code of its methods, and its demonstrations."""
        train = self.control.train
        drawn = draw_demonstrations(
            self.demonstrations, train, step=record.index.version, num_episodes=len(record.episodes)
        )
        return msgspec.structs.replace(record, methods=registry.describe_methods(train), demonstrations=drawn)

    async def _record_drops(self) -> None:
        if drops := self.intake.drops(version=self.version, at=time.time()):
            await self._commit(drops)
            self.reports_due.set()

    async def _commit(self, record: BatchRecord) -> None:
        def append() -> None:
            self.fence.check()
            self.log.append(record)

        await self._retry_until_room(append)  # durable,
        ids = (*record.index.trained, *record.index.dropped)
        await _ack([self.unacked.pop(i) for i in ids if i in self.unacked])  # then forgotten by the broker
        for text in self.intake.warnings():
            log.warning("metrics_not_shown", reason=text)
            await self._emit("warning", {"text": f"learner {self.policy}: {text}"})

    async def _retry_until_room(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, which is retried, with a warning, until the disk has room. Meanwhile nothing is
        acknowledged and no batch is trained. A stop does not wait for room, because the queue still has everything."""
        full = False
        while True:
            try:
                result = write()
            except DiskFullError as error:
                if not full:
                    log.warning("disk_full", reason=str(error), retry_s=self.intervals.retry_s)
                    await self._emit("warning", {"text": f"learner {self.policy} waits: {error}"})
                full = True
                await asyncio.sleep(self.intervals.retry_s)
                continue
            if full:
                log.info("disk_has_room")
            return result

    async def _hand_over(self, record: BatchRecord, *, replayed: bool) -> None:
        version = record.index.version
        self.figures = {version: batch_metrics(*self.log.step(version))}
        await self._send_to_trainer(
            records.BatchReady(record=records.encode_record(record), replayed=replayed, figures=self.figures[version])
        )

    async def _send_to_trainer(
        self, message: records.BatchReady | records.SaveCheckpoint | records.TrainingDone
    ) -> None:
        """Answer the trainer's request for a batch: send a batch, or what to do instead."""
        self.wanted_since = None
        await frames.write(self.writer, message)

    async def _finish_step(self, done: records.StepDone) -> None:
        self.version = done.version
        self.reports_due.set()
        figures = self.figures.get(done.version) or batch_metrics(*self.log.step(done.version))
        fields = {**figures, **done.fields, "version": done.version}
        await self.steps.add(self._event("step", fields))
        if self.metrics:
            self.metrics.observe_step(fields)
        for sign in self.signs.step(fields, self.intake.limits.max_staleness):
            if not done.fields.get("replayed"):  # a replayed step was reported when it was first taken
                log.warning("sign", sign=sign.check, text=sign.text)
                text = f"step {done.version}: {sign.line}"
                await self._emit("warning", {"text": text})

    async def _report(self) -> None:
        while True:
            await self.reports_due.wait()
            self.reports_due.clear()
            await self._publish_due()

    async def _publish_due(self) -> None:
        async with self.reporting:
            for index in self.reports.due(self.version):
                await self._publish_report(index)
                # the number is kept in memory, and the next one that is written includes it
                with contextlib.suppress(DiskFullError):
                    self.reports.confirm(index.record)

    async def _publish_report(self, index: BatchIndex) -> None:
        await self._to_inbox(
            StepReport(
                run=self.job.run,
                policy=self.policy,
                record=index.record,
                version=index.version,
                trained=index.trained,
                dropped=index.dropped,
            )
        )

    async def _to_inbox(self, message: StepReport) -> None:
        """Publish to the collector's inbox and return once the broker has confirmed it. If the queue was deleted, retry
        until the collector has declared it again."""
        while True:
            try:
                return await self.broker.publish(topology.inbox(self.job.run), message)
            except UnroutableError as error:
                log.warning("queue_missing", reason=str(error), retry_s=self.intervals.retry_s)
                await self._emit("warning", {"text": f"learner {self.policy} waits: {error}"})
            await asyncio.sleep(self.intervals.retry_s)

    async def _ask_collector(self) -> None:
        """Ask the collector to publish lost rollouts again. Reports are repeated first, because the collector takes rollouts
        without a report for lost."""
        self.asked_collector = True
        async with self.reporting:
            for index in self.reports.newest(self.intake.limits.window):
                await self._publish_report(index)
            await self._to_inbox(StepReport(run=self.job.run, policy=self.policy, version=self.version, trained=()))
        log.info("rollouts_requested_again", reason="waiting for a batch, but no rollouts arrive")

    async def _tick(self) -> None:
        warned_at = 0.0
        while True:
            await self.steps.settle()
            await self._emit_state()
            now = time.monotonic()
            waited = now - (self.wanted_since or now)
            if not self.asked_collector and min(waited, now - self.last_rollout_at) > self.intervals.ask_s:
                await self._ask_collector()
            if waited > self.intervals.stuck_s and time.monotonic() - warned_at > self.intervals.stuck_s:
                warned_at = time.monotonic()
                await self._warn_stuck(waited)
            await asyncio.sleep(self.intervals.state_s)

    async def _emit_state(self) -> None:
        ready = sum(self.intake.groups_ready.values())
        control = self.control.state.number
        fields = {"phase": self.phase, "version": self.version, "groups_ready": ready, "control": control}
        if self.metrics:
            now = time.monotonic()
            self.metrics.observe_state(fields, waited_s=now - (self.wanted_since or now))
        await self._emit("state", fields)

    async def _warn_stuck(self, waited_s: float) -> None:
        """Warn that the learner waits, and for which groups."""
        if self.control.state.pace != "running":
            return
        needed = self.intake.next_batch(self.version + 1).counts
        ready = self.intake.groups_ready
        lacking = ", ".join(f"{n - ready[k]} of {k}" for k, n in needed.items() if n > ready[k])
        text = (
            f"learner {self.policy} has waited {waited_s:.0f} s for whole groups: {lacking} missing, "
            f"{count_of(self.intake.groups_incomplete, 'group')} begun; are workers running and finishing episodes?"
        )
        log.warning("waiting_for_groups", needed=needed, ready=ready, incomplete=self.intake.groups_incomplete)
        await self._emit("warning", {"text": text, "kind": "stall"})

    async def _emit(self, name: EventName, fields: dict[str, Any]) -> None:
        await self.broker.emit(self._event(name, fields))

    def _event(self, name: EventName, fields: dict[str, Any]) -> Event:
        return Event(run=self.job.run, source=f"learner.{self.policy}", name=name, at=time.time(), fields=fields)


async def _ack(deliveries: Sequence[Delivery]) -> None:
    """Acknowledge deliveries. Redeliveries after a lost session are deduplicated."""
    for delivery in deliveries:
        with contextlib.suppress(BrokerLostError):
            await delivery.ack()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for child in error.exceptions:
            yield from _leaves(child)
    else:
        yield error


if __name__ == "__main__":
    main()
