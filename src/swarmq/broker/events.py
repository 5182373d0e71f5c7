"""Best-effort events.

Events use a channel of their own beside the publisher's, without confirms: a refused or stuck event must not end a session that
carries turns and episode ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aio_pika import DeliveryMode, ExchangeType
from aio_pika import Message as AmqpMessage
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from swarmq.broker import topology
from swarmq.broker.deliveries import FeedQueue
from swarmq.broker.publisher import APP_ID, CONTENT_TYPE
from swarmq.broker.reconnect import BrokerLink
from swarmq.broker.session import Session
from swarmq.errors import MessageError
from swarmq.messages import Event, decode, encode

EMIT_S = 1.0
"""Seconds after which an unsent event is dropped."""


class EventEmitter:
    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self._session: Session | None = None
        self._channel: AbstractChannel | None = None
        self._lock = asyncio.Lock()

    async def emit(self, event: Event) -> bool:
        session = self._link.current
        if session is None or await session.is_blocked():
            return False
        task = asyncio.create_task(self._send(session, event))
        try:
            await asyncio.wait({task}, timeout=EMIT_S)
            return task.done() and not task.cancelled() and task.exception() is None
        finally:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def _send(self, session: Session, event: Event) -> None:
        async with self._lock:
            if self._session is not session or self._channel is None or self._channel.is_closed:
                self._channel = await session.connection.channel(publisher_confirms=False)
                self._session = session
        # `ensure` would need more rights than writing, and a round trip.
        exchange = await self._channel.get_exchange(topology.EVENTS, ensure=False)
        message = AmqpMessage(
            encode(event),
            content_type=CONTENT_TYPE,
            delivery_mode=DeliveryMode.NOT_PERSISTENT,
            type="event",
            app_id=APP_ID,
        )
        await exchange.publish(message, topology.event_key(event.run, event.source, event.name), mandatory=False)


@asynccontextmanager
async def open_event_feed(
    url: str, keys: Sequence[str], *, name: str, on_gap: Callable[[], None], may_declare: bool, login_patience_s: float
) -> AsyncIterator[AsyncIterator[Event]]:
    """Subscribe to the events with these routing keys from now on; a slow subscriber loses the oldest events. `on_gap`: called when the
    subscription is lost, because events may have been missed. `may_declare`: whether the user may declare the exchange.
    `login_patience_s`: seconds that the broker may refuse a login that has worked."""
    feed = EventFeed()

    async def prepare(session: Session) -> None:
        channel = session.channel
        if may_declare:
            await session.call(channel.declare_exchange(topology.EVENTS, ExchangeType.TOPIC, durable=True))
        queue = await session.call(
            channel.declare_queue(exclusive=True, auto_delete=True, arguments=topology.EVENT_QUEUE_ARGUMENTS)
        )
        for key in keys:
            await session.call(queue.bind(topology.EVENTS, key))
        await session.call(queue.consume(feed.on_message, no_ack=True))

    link = BrokerLink(
        url, name=name, prepare=prepare, forget=on_gap, refused=feed.fail, login_patience_s=login_patience_s
    )
    async with link.keep():
        try:
            await link.session()
            yield feed
        finally:
            feed.close()


class EventFeed(FeedQueue[bytes]):
    """Async iterator over decoded events. Events of newer releases and foreign messages are skipped."""

    def __init__(self) -> None:
        super().__init__(max_items=topology.EVENT_BACKLOG)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            try:
                event = decode(await self._next_item())
            except MessageError:
                continue  # an event of a newer release or a foreign message; nothing depends on it
            if isinstance(event, Event):
                return event

    async def on_message(self, message: AbstractIncomingMessage) -> None:
        self.put(message.body)
