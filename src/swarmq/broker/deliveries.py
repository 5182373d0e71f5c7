"""Deliveries as a consumer gets them from an async iterator: decoded and checked.

A source (an AMQP session, or memory in tests) calls `put` for each message, `forget` when its session is lost and its
messages will be redelivered, and `fail` or `close` at the end. The consumer iterates. A batch (message_batches.py) becomes as many
deliveries as it has messages: one that cannot be used is parked alone, and RabbitMQ gets its acknowledgement when all are
acknowledged.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from swarmq.broker import topology
from swarmq.broker.client_rules import find_violation
from swarmq.broker.message_batches import KIND as BATCH
from swarmq.errors import BrokerError, MessageError
from swarmq.messages import Message, RefusedTurn, Turn, decode, decode_batch, idempotency_key

Item = TypeVar("Item")

KEY_HEADER = "x-sq-id"
"""Header with the idempotency key, which is equal for two publishes of the same fact."""

REASON_HEADER = "x-sq-reason"
"""Header of dead letters: why the message could not be used."""

QUEUE_HEADER = "x-sq-queue"
"""Header of dead letters: the queue that the message was meant for."""


SENDER_HEADER = "x-sq-sender"
"""Header of dead letters: the invited client that sent the message. A requeued message keeps its sender and does not count as
an operator's."""


class Settler(Protocol):
    """Interface of the session that delivered a message, by which the message is acknowledged or returned."""

    async def ack(self, tag: int, *, through: bool) -> None: ...

    async def reject(self, tag: int) -> None:
        """Reject the message; the broker parks it in `swarmq.dead`."""


class Arrival(NamedTuple):
    """A message as delivered, not yet decoded."""

    settler: Settler
    tag: int
    body: bytes
    headers: dict[str, Any]
    is_redelivered: bool
    queue: str
    kind: str = ""
    """Message type stated by the sender."""
    sender: str = ""
    """User of the invited client that published the message, verified by RabbitMQ; empty for the run's own processes."""


class BatchSettler:
    """Acknowledges a batch once all its messages are acknowledged; their tags are their places in it."""

    def __init__(self, settler: Settler, tag: int, num_messages: int) -> None:
        self._settler = settler
        self._tag = tag
        self._unacked = set(range(num_messages))

    async def ack(self, tag: int, *, through: bool) -> None:
        self._unacked -= set(range(tag + 1)) if through else {tag}
        if not self._unacked:
            await self._settler.ack(self._tag, through=through)
        elif through:
            await self._settler.ack(self._tag - 1, through=True)

    async def reject(self, tag: int) -> None:
        raise NotImplementedError("the messages of a batch are parked with `dead_letter`")


class Delivery:
    """One message from a queue, decoded and checked."""

    __slots__ = ("arrival", "key", "message")

    def __init__(self, arrival: Arrival, message: Message) -> None:
        self.arrival = arrival
        self.message = message
        self.key: str = arrival.headers.get(KEY_HEADER) or idempotency_key(message)

    @property
    def body(self) -> bytes:
        return self.arrival.body

    @property
    def is_redelivered(self) -> bool:
        return self.arrival.is_redelivered

    async def ack(self) -> None:
        """Acknowledge the message; a second call does nothing.

        Raises BrokerLostError when the session that delivered it is lost: the message will be redelivered. An acknowledgement
        that is in flight when the session ends may be lost too, because the broker does not confirm acknowledgements.
        """
        await self.arrival.settler.ack(self.arrival.tag, through=False)


class FeedQueue(Generic[Item]):
    """Queue between a broker session, which puts items, and one reader, until the feed fails or is closed."""

    def __init__(self, *, max_items: int | None = None) -> None:
        """`max_items`: number of waiting items above which the oldest are lost; None: no limit."""
        self._items: deque[Item] = deque(maxlen=max_items)
        self._changed = asyncio.Event()
        self._failure: BrokerError | None = None
        self._closed = False

    async def _next_item(self) -> Item:
        """Wait for an item. With none left, raises the BrokerError of a failed feed, StopAsyncIteration for a closed one."""
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._changed.set()

    def fail(self, error: BrokerError) -> None:
        self._failure = error
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._items.clear()
        self._changed.set()


class Deliveries(FeedQueue[Arrival]):
    """Async iterator over a queue, which continues with fresh deliveries after a lost session."""

    def __init__(self, bury: Callable[[Arrival, str], Awaitable[None]]) -> None:
        super().__init__()
        self._bury = bury
        self.recycle_s = math.inf
        """Seconds a delivery may be held before it is redelivered to any consumer."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """Return the next delivery. Raises StopAsyncIteration once the context is closed, BrokerError when the queue cannot be
        consumed."""
        while True:
            if (delivery := await self._admit(await self._next_item())) is not None:
                return delivery

    def put(self, item: Arrival) -> None:
        for arrival in _unpack(item):
            super().put(arrival)

    async def batch(self, limit: int) -> list[Delivery]:
        """Wait for a delivery, and return it with the deliveries that have arrived after it, at most `limit` in all. Returns
        an empty list once the context is closed."""
        async for first in self:
            taken = [first]
            while self._items and len(taken) < limit:
                if (delivery := await self._admit(self._items.popleft())) is not None:
                    taken.append(delivery)
            return taken
        return []

    async def ack_through(self, last: Delivery) -> None:
        """Acknowledge `last` and every earlier delivery of its session. Raises BrokerLostError like `Delivery.ack`."""
        await last.arrival.settler.ack(last.arrival.tag, through=True)

    async def _admit(self, arrival: Arrival) -> Delivery | None:
        """Return the delivery, or None if the message cannot be used and was parked.

        A turn that cannot be decoded is returned as a RefusedTurn instead: its reader must know that the turn is missing, and
        parks it.
        """
        try:
            delivery = Delivery(arrival, decode(arrival.body))
        except MessageError as error:
            if refused := _to_refused_turn(arrival, str(error)):
                return Delivery(arrival, refused)
            await self._bury(arrival, str(error))
            return None
        if arrival.sender and (why := find_violation(arrival.sender, arrival.queue, delivery.message)):
            await self._bury(arrival, why)
            return None
        return delivery

    def forget(self) -> None:
        self._items.clear()


def _unpack(arrival: Arrival) -> list[Arrival]:
    """Return the messages of a batch. A batch that cannot be decoded, and any other message, is returned as it is."""
    if arrival.kind != BATCH:
        return [arrival]
    try:
        messages = decode_batch(arrival.body).messages
    except MessageError:
        return [arrival]
    settler = BatchSettler(arrival.settler, arrival.tag, len(messages))
    redelivered, queue, sender = arrival.is_redelivered, arrival.queue, arrival.sender
    return [
        Arrival(settler, place, one.body, {KEY_HEADER: one.key}, redelivered, queue, one.kind, sender)
        for place, one in enumerate(messages)
    ]


def _to_refused_turn(arrival: Arrival, reason: str) -> RefusedTurn | None:
    """Return a RefusedTurn for an undecodable turn of a proxy, which puts the turn's ids in the headers; None for any other
    message, and for one from an invited client."""
    episode_id, _, call_id = str(arrival.headers.get(KEY_HEADER, "")).rpartition(":")
    run = topology.parse_turns_run(arrival.queue)
    if arrival.kind != Turn.__struct_config__.tag or arrival.sender or not episode_id or not run:
        return None
    return RefusedTurn(run=run, episode_id=episode_id, call_id=call_id, reason=reason)
