"""A broker in memory with the same promises as RabbitMQ within one process, and faults on demand.

Messages are stored encoded, so a record that would not survive the wire does not survive here either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from swarmq.broker import topology
from swarmq.broker.deliveries import KEY_HEADER, QUEUE_HEADER, REASON_HEADER, Arrival, Deliveries, Delivery
from swarmq.broker.events import EventFeed
from swarmq.broker.protocol import Depth
from swarmq.errors import BrokerLostError, UnconfirmedError, UnroutableError
from swarmq.messages import Event, Message, encode, idempotency_key


class StoredMessage(msgspec.Struct, kw_only=True):
    """A message in a queue."""

    body: bytes
    headers: dict[str, Any]
    kind: str = ""
    delivered: int = 0


class _Subscription(NamedTuple):
    run: str
    senders: frozenset[str]
    feed: EventFeed
    on_gap: Callable[[], None]


class MemoryBroker:
    """In-memory implementation of `swarmq.broker.Broker`. Tests cause faults by `interrupt`, `away`, `alarm`, `delete` and
    `wreck`."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._feeds: list[_Subscription] = []
        self._present = asyncio.Event()
        self._present.set()
        self._room = asyncio.Event()
        self._room.set()
        self._orphans: dict[str, list[_Consumer]] = {}
        """Deleted queue -> consumers that wait until the queue is declared again."""
        self._books: dict[str, asyncio.Lock] = {}
        self._receipts: dict[str, set[str]] = {}
        self.emitted: list[Event] = []
        """All events that were not dropped, for tests to inspect."""

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        body = encode(message)
        try:
            async with asyncio.timeout(deadline_s):
                await self._present.wait()
                await self._room.wait()
                await self._queue(queue).up.wait()
        except TimeoutError:
            raise UnconfirmedError(f"not confirmed within {deadline_s} s: broker or queue are away") from None
        await asyncio.sleep(0)
        self.put(queue, body, {KEY_HEADER: idempotency_key(message)}, kind=str(message.__struct_config__.tag))

    def put(self, queue: str, body: bytes, headers: dict[str, Any] | None = None, *, kind: str = "") -> None:
        """Put raw bytes into a queue, also bytes that cannot be decoded."""
        self._queue(queue).put(StoredMessage(body=body, headers=headers or {}, kind=kind))

    @asynccontextmanager
    async def receipts(self, book: str) -> AsyncIterator[_Receipts]:
        async with self._books.setdefault(book, asyncio.Lock()):
            yield _Receipts(self, self._receipts.setdefault(book, set()))

    @asynccontextmanager
    async def consume(self, queue: str, *, prefetch: int) -> AsyncIterator[Deliveries]:
        await self._present.wait()
        source = self._queue(queue)
        deliveries = Deliveries(self._bury)
        consumer = _Consumer(source, deliveries, prefetch)
        source.join(consumer)
        try:
            yield deliveries
        finally:
            deliveries.close()
            consumer.leave()

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        self._park(delivery.arrival, reason)
        await delivery.ack()

    async def is_blocked(self) -> bool:
        return self._present.is_set() and not self._room.is_set()

    async def emit(self, *events: Event) -> bool:
        if not (self._present.is_set() and self._room.is_set()):
            return False
        for event in events:
            self.emitted.append(event)
            for one in self._feeds:
                if one.run == event.run and (not one.senders or event.source.partition(".")[0] in one.senders):
                    one.feed.put(encode(event))
        return True

    @asynccontextmanager
    async def events(
        self, run: str, *, senders: Sequence[str] = (), on_gap: Callable[[], None] = lambda: None
    ) -> AsyncIterator[AsyncIterator[Event]]:
        feed = EventFeed()
        subscription = _Subscription(run, frozenset(senders), feed, on_gap)
        self._feeds.append(subscription)
        try:
            yield feed
        finally:
            self._feeds.remove(subscription)
            feed.close()

    async def declare(
        self,
        run: str,
        *,
        policies: Iterable[str],
        kinds: Iterable[str],
        replicas: int | None = None,
        turn_queues: int = 0,
    ) -> None:
        queues = {
            topology.DEAD: topology.dead_letter_arguments(),
            **topology.run_queues(run, policies=policies, kinds=kinds, replicas=replicas, turn_queues=turn_queues),
        }
        for name, arguments in queues.items():
            queue = self._queues.setdefault(name, _Queue(name, single="x-single-active-consumer" in arguments))
            for consumer in self._orphans.pop(name, ()):
                consumer.move(queue)

    async def depths(self, queues: Sequence[str]) -> dict[str, Depth]:
        return {name: self._queues[name].depth for name in queues if name in self._queues}

    async def delete_if_dead(self, queue: str) -> bool:
        if (listed := self._queues.get(queue)) is None or listed.up.is_set():
            return False
        self.delete(queue)
        listed.up.set()  # wakes its publishers, which then look up the queue again
        return True

    def interrupt(self) -> None:
        """End the sessions of all consumers: their unacknowledged messages are redelivered, and old deliveries cannot be
        acknowledged."""
        for queue in self._queues.values():
            queue.interrupt()

    def away(self, *, gone: bool) -> None:
        """Make the broker unreachable, or reachable again. Publishers wait; consumers lose their sessions."""
        if gone:
            self._present.clear()
            for one in self._feeds:
                one.on_gap()
            self.interrupt()
        else:
            self._present.set()
        for queue in self._queues.values():
            queue.paused = gone
            queue.push()

    def alarm(self, *, on: bool) -> None:
        """Set or clear the alarm for low memory or disk: publishers wait, consumers continue."""
        if on:
            self._room.clear()
        else:
            self._room.set()

    def delete(self, queue: str) -> None:
        """Delete a queue with its messages while consumers use it; they wait until it is declared again."""
        orphans = self._orphans.setdefault(queue, [])
        orphans += self._queues.pop(queue).drop()

    def wreck(self, queue: str) -> None:
        """Leave a queue in the state of a crash during its deletion: the name exists, but confirms and delivers nothing."""
        dead = _Queue(queue, single=False)
        dead.up.clear()
        self.delete(queue)
        self._queues[queue] = dead

    def purge(self, queue: str) -> None:
        """Remove the messages of a queue that are not held by a consumer."""
        self._queue(queue).waiting.clear()

    def stored(self, queue: str) -> list[StoredMessage]:
        """Return the messages that wait in a queue, oldest first."""
        return list(self._queue(queue).waiting)

    def _queue(self, name: str) -> _Queue:
        try:
            return self._queues[name]
        except KeyError:
            raise UnroutableError(f"no queue {name}: declare the run first") from None

    async def _bury(self, arrival: Arrival, reason: str) -> None:
        self._park(arrival, reason)
        await arrival.settler.ack(arrival.tag, through=False)

    def _park(self, arrival: Arrival, reason: str) -> None:
        headers = {**arrival.headers, REASON_HEADER: reason, QUEUE_HEADER: arrival.queue}
        self.put(topology.DEAD, arrival.body, headers, kind=arrival.kind)


class _Receipts:
    """In-memory implementation of `swarmq.broker.protocol.Receipts`."""

    def __init__(self, broker: MemoryBroker, keys: set[str]) -> None:
        self._broker = broker
        self._keys = keys

    async def publish(self, queue: str, messages: Sequence[Message]) -> None:
        for message in messages:
            if idempotency_key(message) not in self._keys:
                await self._broker.publish(queue, message)
                self._keys.add(idempotency_key(message))

    async def clear(self) -> None:
        self._keys.clear()

    async def close(self) -> None:
        self._keys.clear()


class _Queue:
    def __init__(self, name: str, *, single: bool) -> None:
        self.name = name
        self.single = single
        self.paused = False
        self.up = asyncio.Event()
        self.up.set()
        self.waiting: deque[StoredMessage] = deque()
        self.consumers: list[_Consumer] = []

    @property
    def depth(self) -> Depth:
        return Depth(len(self.waiting), len(self.consumers))

    def put(self, stored: StoredMessage) -> None:
        self.waiting.append(stored)
        self.push()

    def join(self, consumer: _Consumer) -> None:
        self.consumers.append(consumer)
        self.push()

    def leave(self, consumer: _Consumer) -> None:
        if consumer in self.consumers:
            self.consumers.remove(consumer)
        self._take_back(consumer)
        self.push()

    def interrupt(self) -> None:
        for consumer in self.consumers:
            self._take_back(consumer)
        self.push()

    def drop(self) -> list[_Consumer]:
        """Remove all messages, and return the consumers that are left without a queue."""
        for consumer in self.consumers:
            consumer.forget()
        left, self.consumers = self.consumers, []
        return left

    def push(self) -> None:
        """Deliver waiting messages to consumers with room: in turn, or, in a queue with a single active consumer, to the first one."""
        while self.waiting and not self.paused:
            taker = next((consumer for consumer in self._candidates() if consumer.has_room), None)
            if taker is None:
                return
            if not self.single:
                self.consumers.append(self.consumers.pop(self.consumers.index(taker)))
            taker.take(self.waiting.popleft())

    def _candidates(self) -> list[_Consumer]:
        return self.consumers[:1] if self.single else self.consumers

    def _take_back(self, consumer: _Consumer) -> None:
        held = consumer.forget()
        for stored in held:
            stored.delivered += 1
        self.waiting.extendleft(reversed(held))


class _Consumer:
    """One consumer and its present session; a lost session is replaced by a new one."""

    def __init__(self, queue: _Queue, deliveries: Deliveries, prefetch: int) -> None:
        self._queue = queue
        self._prefetch = prefetch
        self._session = _Session(queue)
        self._closed = False
        self.deliveries = deliveries

    def leave(self) -> None:
        self._closed = True
        self._queue.leave(self)

    def move(self, queue: _Queue) -> None:
        """Continue with the queue that replaces a deleted one."""
        self.forget()
        self._queue, self._session = queue, _Session(queue)
        if not self._closed:
            queue.join(self)

    @property
    def has_room(self) -> bool:
        return len(self._session.held) < self._prefetch

    def take(self, stored: StoredMessage) -> None:
        tag = self._session.hold(stored)
        self.deliveries.put(
            Arrival(
                self._session, tag, stored.body, stored.headers, bool(stored.delivered), self._queue.name, stored.kind
            )
        )

    def forget(self) -> list[StoredMessage]:
        """End the session, and return the messages that it held, oldest first."""
        held = list(self._session.held.values())
        self._session.lost = True
        self._session = _Session(self._queue)
        self.deliveries.forget()
        return held


class _Session:
    """Messages that were delivered in one session and are not acknowledged yet."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._last = 0
        self.held: dict[int, StoredMessage] = {}
        self.lost = False

    def hold(self, stored: StoredMessage) -> int:
        self._last += 1
        self.held[self._last] = stored
        return self._last

    async def ack(self, tag: int, *, through: bool) -> None:
        if self.lost:
            raise BrokerLostError("the session that delivered this message is lost; the message will be redelivered")
        for known in [known for known in self.held if known == tag or (through and known < tag)]:
            del self.held[known]
        self._queue.push()

    async def reject(self, tag: int) -> None:
        raise NotImplementedError(
            "a client of the in-memory broker is an operator, who parks messages with `dead_letter`"
        )
