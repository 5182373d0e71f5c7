"""Workers of the collector: processes that exchange messages with RabbitMQ for it, so that this work has cores of its own.

              RabbitMQ                        worker                              collector
  turns.<n>, in ──deliver──> decode, check, hold ──────Received──────> decide, commit ──┐
                <──ack through── held <─────────────Acknowledge────────────────────────┘
  ready, tickets <──publish── assemble, encode <──Publish, Forward── outbox
                 ──confirm──────────────────────────────Done─────────> mark

A worker decides and stores nothing: a message that it has not acknowledged is redelivered, and the collector publishes again what it
has not confirmed. Workers end with their collector, also if it hangs, because only then a standby can take over. The collector ends with
any of its workers, so there is one kind of crash. `worker.py` is the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec

from swarmq.broker import Delivery
from swarmq.broker.deliveries import Arrival, FeedQueue
from swarmq.collector.decide.assemble import StoredRollout
from swarmq.errors import BrokerError, UnconfirmedError, UnroutableError, WorkerLostError
from swarmq.messages import Event, Message
from swarmq.runtime.frames import read_frame, write_frame
from swarmq.runtime.processes import die_with_parent

COMMAND = (sys.executable, "-m", "swarmq.collector.worker")
SILENT_S = 45.0
"""Seconds without a record of the collector after which a worker ends, as RabbitMQ ends a connection that misses its heartbeats."""
PINGS = 5
"""Number of pings in that time."""
STOP_S = 10.0
"""Seconds that a worker may take to close its connections."""

ERRORS: dict[str, type[BrokerError]] = {error.__name__: error for error in (UnroutableError, UnconfirmedError)}
"""Errors of the broker that the collector handles. Any other error ends a worker."""


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the records between the collector and a worker."""


class Hello(Record, frozen=True):
    """The collector's first record."""

    url: str
    name: str
    """Name of the worker's connections in RabbitMQ's management UI."""
    run: str
    silent_s: float


class Ping(Record, frozen=True):
    """A sign of life of the collector."""


class Consume(Record, frozen=True):
    queue: str
    prefetch: int


class Acknowledge(Record, frozen=True):
    """Acknowledge all messages of a queue up to a number."""

    queue: str
    through: int


class DeadLetter(Record, frozen=True):
    token: int
    queue: str
    number: int
    reason: str


class Publish(Record, frozen=True):
    token: int
    queue: str
    message: Message
    deadline_s: float


class Forward(Record, frozen=True):
    """Assemble a rollout and publish it."""

    token: int
    queue: str
    rollout: StoredRollout
    deadline_s: float


class Emit(Record, frozen=True):
    """Publish events, if possible."""

    events: tuple[Event, ...]


class Received(Record, frozen=True):
    """Messages of a queue, decoded and checked, as (body, sender), with successive numbers from `first`."""

    queue: str
    first: int
    messages: list[tuple[bytes, str]]


class Done(Record, frozen=True):
    """The outcome of the collector's record with this token: done, or an error of ERRORS with its text."""

    token: int
    error: str = ""
    text: str = ""


class ConsumerFailed(Record, frozen=True):
    queue: str
    error: str
    text: str


ToWorker = Hello | Ping | Consume | Acknowledge | DeadLetter | Publish | Forward | Emit
FromWorker = Received | Done | ConsumerFailed

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
"""Decoder for bodies that a worker has checked."""


async def read_command(reader: asyncio.StreamReader) -> ToWorker:
    """Read a record of the collector. Raises EOFError if it is gone."""
    return _to_worker.decode(await read_frame(reader))


async def send(writer: asyncio.StreamWriter, record: ToWorker | FromWorker) -> None:
    """Write a record. Raises EOFError if the other side is gone."""
    await write_frame(writer, _encoder.encode(record))


class _Deliveries(FeedQueue[tuple[int, bytes, str]]):
    """The deliveries of one queue that a worker consumes."""

    def __init__(self, worker: _Worker, queue: str) -> None:
        super().__init__()
        self._worker, self._queue = worker, queue

    async def batch(self, limit: int) -> list[Delivery]:
        """Wait for a delivery, and return it with those that have arrived after it, at most `limit` in all; see `Deliveries`."""
        taken = [self._decode(*await self._next_item())]
        while self._items and len(taken) < limit:
            taken.append(self._decode(*self._items.popleft()))
        return taken

    async def ack_through(self, last: Delivery) -> None:
        await self._worker.send(Acknowledge(self._queue, last.arrival.tag))

    def _decode(self, number: int, body: bytes, sender: str) -> Delivery:
        arrival = Arrival(self._worker, number, body, {}, is_redelivered=False, queue=self._queue, sender=sender)
        return Delivery(arrival, _messages.decode(body))


class _Worker:
    """The collector's end of one worker."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self._number, self._process, self._writer = number, process, writer
        self._tokens = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self.deliveries: dict[str, _Deliveries] = {}

    @property
    def num_waiting(self) -> int:
        """Number of records that the worker has yet to carry out."""
        return len(self._waiting)

    async def send(self, record: ToWorker) -> None:
        try:
            await send(self._writer, record)
        except EOFError:
            await asyncio.Event().wait()  # `listen` ends the collector

    async def ask(self, make: Any, *fields: Any) -> None:
        """Send a record, and return when the worker has carried it out. Raises the errors of ERRORS."""
        token = next(self._tokens)
        done = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            await self.send(make(token, *fields))
            await done
        finally:
            del self._waiting[token]

    async def ack(self, tag: int, *, through: bool) -> None:
        raise NotImplementedError("a worker's deliveries are acknowledged in batches")

    async def reject(self, tag: int) -> None:
        raise NotImplementedError("a collector parks messages with a reason")

    async def ping(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.send(Ping())

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Take the worker's records. Raises WorkerLostError when the worker ends."""
        try:
            while True:
                self._take(_from_worker.decode(await read_frame(reader)))
        except EOFError:
            status = await self._process.wait()
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
            raise WorkerLostError(
                f"worker {self._number} of the collector (pid {self._process.pid}) {how}, see its last lines above: the collector "
                "goes on where it was when it is started again"
            ) from None

    def _take(self, record: FromWorker) -> None:
        match record:
            case Received():
                deliveries = self.deliveries[record.queue]
                for number, (body, sender) in enumerate(record.messages, record.first):
                    deliveries.put((number, body, sender))
            case Done():
                done = self._waiting.get(record.token)
                if done and not done.done():
                    done.set_exception(ERRORS[record.error](record.text)) if record.error else done.set_result(None)
            case ConsumerFailed():
                self.deliveries[record.queue].fail(ERRORS[record.error](record.text))


class Workers:
    """All workers of a collector, used like a broker."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = workers
        self._consumers: dict[str, _Worker] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, num: int, url: str, *, run: str, silent_s: float = SILENT_S) -> AsyncIterator[Self]:
        """Start workers, and stop them at the end. Raises WorkerLostError when one of them ends. `silent_s`: see SILENT_S."""
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            workers, watching = [], []
            for number in range(1, num + 1):
                hello = Hello(url, f"collector.{run}.{number}", run, silent_s)
                worker, reader = await stack.enter_async_context(_start(number, hello))
                workers.append(worker)
                watching.append(tasks.create_task(worker.listen(reader)))
                watching.append(tasks.create_task(worker.ping(silent_s / PINGS)))
            yield cls(workers)
            for task in watching:
                task.cancel()

    def __len__(self) -> int:
        return len(self._workers)

    @asynccontextmanager
    async def consume(self, queue: str, *, prefetch: int) -> AsyncIterator[_Deliveries]:
        """Consume a queue for as long as the workers live; one worker has the queue, whoever consumes it again."""
        worker = self._consumers.setdefault(queue, self._workers[len(self._consumers) % len(self._workers)])
        deliveries = worker.deliveries[queue] = _Deliveries(worker, queue)
        await worker.send(Consume(queue, prefetch))
        yield deliveries

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        queue = delivery.arrival.queue
        await self._consumers[queue].ask(DeadLetter, queue, delivery.arrival.tag, reason)

    async def publish(self, queue: str, message: Message | StoredRollout, *, deadline_s: float) -> None:
        """Publish a message, or a rollout yet to be assembled, as `Broker.publish` does."""
        make = Forward if isinstance(message, StoredRollout) else Publish
        idlest = min(self._workers, key=lambda worker: worker.num_waiting)
        await idlest.ask(make, queue, message, deadline_s)

    async def emit(self, *events: Event) -> None:
        """Publish events, if possible; see `Broker.emit`."""
        await self._workers[-1].send(Emit(events))


@asynccontextmanager
async def _start(number: int, hello: Hello) -> AsyncIterator[tuple[_Worker, asyncio.StreamReader]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),  # its messages go to the next collector at once
        )
    reader, writer = await asyncio.open_connection(sock=ours)
    worker = _Worker(number, process, writer)
    try:
        await worker.send(hello)
        yield worker, reader
    finally:
        writer.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
