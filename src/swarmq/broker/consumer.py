"""Consumers: one session per queue, manual acknowledgement, and a new session before RabbitMQ's acknowledgement timeout.

RabbitMQ closes a consumer that holds a message unacknowledged for 30 minutes (4.3 does so silently). Every consumer requests a
timeout of one week, which RabbitMQ respects since 3.12. For older servers that swarmq starts, the timeout is in the server's
configuration, and the server states it in a server property. For all other older servers 30 minutes are assumed.

A session whose oldest message comes near the timeout ends itself. Its messages are redelivered to this or another consumer, and
acknowledging an old delivery raises BrokerLostError.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any

from aiormq.abc import DeliveredMessage

from swarmq.broker import topology
from swarmq.broker.deliveries import SENDER_HEADER, Arrival, Deliveries
from swarmq.broker.reconnect import BrokerLink
from swarmq.broker.session import RECYCLED_PREFIX, Session

DEFAULT_ACK_S = 30 * 60.0
"""RabbitMQ's default acknowledgement timeout in seconds."""
CONSUMER_TIMEOUT_VERSION = (3, 12)
"""First RabbitMQ version that respects `x-consumer-timeout`."""
RECYCLE_FRACTION = 2 / 3
"""Fraction of the acknowledgement timeout after which a session ends itself."""
MAX_PREFETCH = 65535


@asynccontextmanager
async def open_consumer(
    url: str,
    queue: str,
    *,
    prefetch: int,
    name: str,
    bury: Callable[[Arrival, str], Awaitable[None]],
    ack_s: float = topology.ACK_S,
    default_ack_s: float = DEFAULT_ACK_S,
    recycle_s: float | None = None,
    login_patience_s: float = math.inf,
    next_offset: Callable[[], int] | None = None,
) -> AsyncIterator[Deliveries]:
    """Open a consumer of `queue`. Raises UnroutableError if there is no such queue. For a stream, `next_offset` returns the
    offset from which to read on, also after a lost session.

    `ack_s` is the acknowledgement timeout to request, `default_ack_s` the timeout to assume where the server ignores requests
    and states none. `recycle_s` overrides the age at which a session ends itself. `bury` parks a message that cannot be
    used.
    """
    if not 1 <= prefetch <= MAX_PREFETCH:
        raise ValueError(
            f"prefetch must be between 1 and {MAX_PREFETCH} (got {prefetch})"
        )  # RabbitMQ would take 0 as 2000
    deliveries = Deliveries(bury)

    async def prepare(session: Session) -> None:
        await session.call(session.channel.set_qos(prefetch_count=prefetch))
        deliveries.recycle_s = (
            RECYCLE_FRACTION * find_ack_limit_s(session.server, ack_s, default_ack_s)
            if recycle_s is None
            else recycle_s
        )
        place = {} if next_offset is None else {topology.STREAM_OFFSET: next_offset()}
        await ConsumerSession(session, queue, deliveries).start(topology.consumer_arguments(ack_s) | place)

    link = BrokerLink(
        url,
        name=name,
        prepare=prepare,
        forget=deliveries.forget,
        refused=deliveries.fail,
        login_patience_s=login_patience_s,
    )
    async with link.keep():
        try:
            await link.session()
            yield deliveries
        finally:
            deliveries.close()


def find_ack_limit_s(server: Mapping[str, Any], asked_s: float, default_s: float) -> float:
    """Return the acknowledgement timeout that holds for a consumer, given the server's properties."""
    version = tuple(int(part) for part in re.findall(r"\d+", str(server.get("version", "")))[:2])
    if version >= CONSUMER_TIMEOUT_VERSION:
        return asked_s
    stated = server.get(topology.ACK_TIMEOUT_PROPERTY)
    return float(stated) / 1000 if isinstance(stated, int) else default_s


class ConsumerSession:
    """One session of a consumer: its unacknowledged messages, and its end before they are too old."""

    def __init__(self, session: Session, queue: str, deliveries: Deliveries) -> None:
        self._session = session
        self._queue = queue
        self._deliveries = deliveries
        self._recycle_s = deliveries.recycle_s
        self._loop = asyncio.get_running_loop()
        self._unacked: dict[int, float] = {}
        """Delivery tag of an unacknowledged message -> time of its arrival, oldest first."""

    async def start(self, arguments: dict[str, Any]) -> None:
        self._check_age()
        # aio-pika would wrap every message and run two tasks for it, which costs more than all the rest of a delivery.
        consuming = self._session.underlay.basic_consume(self._queue, self._on_message, arguments=arguments)
        await self._session.call(consuming)

    async def ack(self, tag: int, *, through: bool) -> None:
        if self._session.lost.done():
            raise self._session.lost_error()
        if through:
            covered = list(takewhile(lambda known: known <= tag, self._unacked))
        else:
            covered = [tag] if tag in self._unacked else []
        for known in covered:
            del self._unacked[known]
        if covered:
            await self._session.call(self._session.underlay.basic_ack(covered[-1], multiple=through))

    async def reject(self, tag: int) -> None:
        if self._session.lost.done():
            raise self._session.lost_error()
        if self._unacked.pop(tag, None) is not None:
            await self._session.call(self._session.underlay.basic_reject(tag, requeue=False))

    async def _on_message(self, message: DeliveredMessage) -> None:
        """Record the message and hand it on. Must not raise: the driver only logs exceptions of this callback."""
        tag, properties = message.delivery_tag, message.header.properties
        if self._session.lost.done() or tag is None:
            return
        headers: dict[str, Any] = properties.headers or {}
        self._unacked[tag] = self._loop.time()
        self._deliveries.put(
            Arrival(
                settler=self,
                tag=tag,
                body=message.body,
                headers=headers,
                is_redelivered=bool(message.redelivered),
                queue=self._queue,
                kind=properties.message_type or "",
                sender=_sender(message, headers),
            )
        )

    def _check_age(self) -> None:
        """End the session if the oldest message is too old, else schedule the next check."""
        now = self._loop.time()
        oldest = next(iter(self._unacked.values()), now)
        left_s = oldest + self._recycle_s - now
        if left_s <= 0:
            self._session.fail(f"{RECYCLED_PREFIX}: a message was held for {self._recycle_s:g} s")
            return
        timer = self._loop.call_later(left_s, self._check_age)
        self._session.lost.add_done_callback(lambda _: timer.cancel())


def _sender(message: DeliveredMessage, headers: Mapping[str, Any]) -> str:
    if message.exchange == topology.CLIENTS:
        return topology.parse_sender(message.routing_key or "")
    return str(headers.get(SENDER_HEADER, ""))
