"""What a consumer sees: deliveries, decoded and checked, and the iterator that brings them.

A source (an AMQP session, or memory in tests) calls `arrive` for each message, `forget` when its session is gone and
what had arrived will come again, and `fail` or `close` at the end. The consumer iterates.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, Self

from swarmq.broker import topology
from swarmq.broker.client_rules import find_violation
from swarmq.errors import BrokerError, MessageError
from swarmq.messages import Message, RefusedTurn, Turn, decode, idempotency_key

KEY_HEADER = "x-sq-id"
"""Idempotency key: equal for two sendings of the same fact."""

REASON_HEADER = "x-sq-reason"
"""On dead messages: why nobody could use it."""

QUEUE_HEADER = "x-sq-queue"
"""On dead messages: the queue it was meant for."""


SENDER_HEADER = "x-sq-sender"
"""On dead messages: the invited client that sent it, so that sending it back does not make it an operator's."""


class Settler(Protocol):
    """The session a message came by."""

    async def ack(self, tag: int, *, through: bool) -> None: ...

    async def reject(self, tag: int) -> None:
        """Let the broker park it in `swarmq.dead`."""


class Arrival(NamedTuple):
    """One message as it came, not yet decoded."""

    settler: Settler
    tag: int
    body: bytes
    headers: dict[str, Any]
    is_redelivered: bool
    queue: str
    kind: str = ""
    """The message type its sender stated."""
    sender: str = ""
    """The user of the invited client that published it, as RabbitMQ has verified; empty: one of our own processes."""


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
        """Tell the broker to forget it; a second time does nothing.

        Raises BrokerLostError when the session that brought it is gone: it will come again. So may one whose
        acknowledgement was under way when the session ended: the broker does not confirm them.
        """
        await self.arrival.settler.ack(self.arrival.tag, through=False)


class Deliveries:
    """Async iterator over a queue. After a lost session it goes on with fresh deliveries by itself."""

    def __init__(self, bury: Callable[[Arrival, str], Awaitable[None]]) -> None:
        self._bury = bury
        self._arrivals: deque[Arrival] = deque()
        self._wake = asyncio.Event()
        self._failure: BrokerError | None = None
        self._closed = False
        self.recycle_s = math.inf
        """How long a delivery may be held; one that is held longer comes again, to whoever is there."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """Raises StopAsyncIteration once the context is closed, BrokerError when the queue cannot be consumed."""
        while True:
            while self._arrivals:
                delivery = await self._admit(self._arrivals.popleft())
                if delivery is not None:
                    return delivery
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    async def batch(self, limit: int) -> list[Delivery]:
        """Wait for one, then take what is already here, at most `limit`. Empty once the context is closed."""
        async for first in self:
            taken = [first]
            while self._arrivals and len(taken) < limit:
                delivery = await self._admit(self._arrivals.popleft())
                if delivery is not None:
                    taken.append(delivery)
            return taken
        return []

    async def ack_through(self, last: Delivery) -> None:
        """Acknowledge `last` and everything before it on its session. Raises BrokerLostError like `Delivery.ack`."""
        await last.arrival.settler.ack(last.arrival.tag, through=True)

    async def _admit(self, arrival: Arrival) -> Delivery | None:
        """The delivery, or None for poison, which is parked with its reason. A turn that is poison its reader parks, who must
        know that it is missing."""
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

    def arrive(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._wake.set()

    def forget(self) -> None:
        self._arrivals.clear()

    def fail(self, error: BrokerError) -> None:
        self._failure = error
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._arrivals.clear()
        self._wake.set()


def _to_refused_turn(arrival: Arrival, reason: str) -> RefusedTurn | None:
    """Of a proxy, which names it beside the body; None for anything else, and for what an invited client calls a turn."""
    episode_id, _, call_id = str(arrival.headers.get(KEY_HEADER, "")).rpartition(":")
    run = topology.parse_inbox_run(arrival.queue)
    if arrival.kind != Turn.__struct_config__.tag or arrival.sender or not episode_id or not run:
        return None
    return RefusedTurn(run=run, episode_id=episode_id, call_id=call_id, reason=reason)
