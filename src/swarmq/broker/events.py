"""Best-effort events.

Events use a channel of their own beside the publisher's, without confirms: a refused or stuck event must not end a session that
carries turns and episode ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from aio_pika import DeliveryMode, ExchangeType
from aio_pika.abc import AbstractIncomingMessage
from aiormq import spec
from aiormq.abc import AbstractChannel

from swarmq.broker import topology
from swarmq.broker.deliveries import FeedQueue
from swarmq.broker.message_batches import KIND as BATCH
from swarmq.broker.message_batches import pack
from swarmq.broker.publisher import APP_ID, CONTENT_TYPE
from swarmq.broker.reconnect import BrokerLink
from swarmq.broker.session import Session
from swarmq.errors import MessageError
from swarmq.messages import Event, PackedMessage, decode, decode_batch, encode

EMIT_S = 1.0
"""Seconds after which an unsent event is dropped."""


class EventEmitter:
    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self._session: Session | None = None
        self._channel: AbstractChannel | None = None
        self._lock = asyncio.Lock()

    async def emit(self, *events: Event) -> bool:
        session = self._link.current
        if session is None or await session.is_blocked():
            return False
        task = asyncio.create_task(self._send(session, events))
        try:
            await asyncio.wait({task}, timeout=EMIT_S)
            return task.done() and not task.cancelled() and task.exception() is None
        finally:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def _send(self, session: Session, events: Sequence[Event]) -> None:
        async with self._lock:
            if self._session is not session or self._channel is None or self._channel.is_closed:
                channel = await session.connection.channel(publisher_confirms=False)
                self._channel = await channel.get_underlay_channel()
                self._session = session
        run, source = events[0].run, events[0].source
        message = pack(run, [PackedMessage("event", "", encode(event)) for event in events])
        properties = spec.Basic.Properties(
            content_type=CONTENT_TYPE,
            delivery_mode=DeliveryMode.NOT_PERSISTENT,
            message_type=message.kind,
            app_id=APP_ID,
        )
        await self._channel.basic_publish(
            message.body,
            exchange=topology.EVENTS,
            routing_key=topology.event_key(run, source, events[0].name),
            properties=properties,
        )


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
        bodies = [message.body]
        if message.type == BATCH:
            with suppress(MessageError):  # as any message that is no event
                bodies = [one.body for one in decode_batch(message.body).messages]
        for body in bodies:
            self.put(body)
