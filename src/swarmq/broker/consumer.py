"""Consuming: a session of its own per queue, manual acknowledgement, recycled before the broker loses patience.

RabbitMQ gives up on a consumer that holds a message unacknowledged for 30 minutes (less or more by its settings), on
4.3 without a word. So a session whose oldest message is older than RECYCLE_S ends itself: what it held comes again, to
this consumer or another, and acknowledging the old delivery raises BrokerLostError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import NamedTuple

from aio_pika.abc import AbstractIncomingMessage

from swarmq.broker import topology
from swarmq.broker.delivery import SENDER_HEADER, Arrival, Deliveries
from swarmq.broker.link import Link
from swarmq.broker.session import Session

RECYCLE_S = 20 * 60.0
MAX_PREFETCH = 65535


@asynccontextmanager
async def consuming(
    url: str,
    queue: str,
    *,
    prefetch: int,
    name: str,
    bury: Callable[[Arrival, str], Awaitable[None]],
    recycle_s: float = RECYCLE_S,
) -> AsyncIterator[Deliveries]:
    """Deliveries of `queue`. Raises UnroutableError when there is no such queue."""
    if not 1 <= prefetch <= MAX_PREFETCH:
        raise ValueError(f"prefetch {prefetch} is not within 1 and {MAX_PREFETCH}")  # 0 would mean 2000
    deliveries = Deliveries(bury)

    async def prepare(session: Session) -> None:
        await session.call(session.channel.set_qos(prefetch_count=prefetch))
        await Intake(session, queue, deliveries, recycle_s).start()

    link = Link(url, name=name, prepare=prepare, forget=deliveries.forget, refused=deliveries.fail)
    async with link.keep():
        try:
            await link.session()
            yield deliveries
        finally:
            deliveries.close()


class Held(NamedTuple):
    """A message that has come and not been acknowledged."""

    message: AbstractIncomingMessage
    since: float


class Intake:
    """What one session has brought and who has not been acknowledged yet."""

    def __init__(self, session: Session, queue: str, deliveries: Deliveries, recycle_s: float) -> None:
        self._session = session
        self._queue = queue
        self._deliveries = deliveries
        self._recycle_s = recycle_s
        self._loop = asyncio.get_running_loop()
        self._unacked: dict[int, Held] = {}
        """By delivery tag, oldest first."""

    async def start(self) -> None:
        self._watch()
        queue = await self._session.channel.get_queue(self._queue, ensure=False)
        await self._session.call(queue.consume(self._on_message))

    async def ack(self, tag: int, *, through: bool) -> None:
        if self._session.lost.done():
            raise self._session.lost_error()
        if through:
            covered = list(takewhile(lambda known: known <= tag, self._unacked))
        else:
            covered = [tag] if tag in self._unacked else []
        held = [self._unacked.pop(known) for known in covered]
        if held:
            await self._session.call(held[-1].message.ack(multiple=through))

    async def reject(self, tag: int) -> None:
        if self._session.lost.done():
            raise self._session.lost_error()
        if held := self._unacked.pop(tag, None):
            await self._session.call(held.message.reject(requeue=False))

    async def _on_message(self, message: AbstractIncomingMessage) -> None:
        """Nothing but bookkeeping: the driver only logs what is raised here."""
        tag = message.delivery_tag
        if self._session.lost.done() or tag is None:
            return
        self._unacked[tag] = Held(message, self._loop.time())
        self._deliveries.arrive(
            Arrival(
                settler=self,
                tag=tag,
                body=message.body,
                headers=message.headers,
                redelivered=bool(message.redelivered),
                queue=self._queue,
                kind=message.type or "",
                sender=_sender(message),
            )
        )

    def _watch(self) -> None:
        """Recycle when the oldest message is too old, else look again when it would be."""
        now = self._loop.time()
        oldest = next((held.since for held in self._unacked.values()), now)
        left_s = oldest + self._recycle_s - now
        if left_s <= 0:
            self._session.fail(f"recycled: a message was held for {self._recycle_s:g} s")
            return
        timer = self._loop.call_later(left_s, self._watch)
        self._session.lost.add_done_callback(lambda _: timer.cancel())


def _sender(message: AbstractIncomingMessage) -> str:
    if message.exchange == topology.CLIENTS:
        return topology.sender_of(message.routing_key or "")
    return str(message.headers.get(SENDER_HEADER, ""))
