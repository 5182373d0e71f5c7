"""The RabbitMQ implementation of the broker.

    AmqpBroker ── link "<name>.publish" ── Publisher (confirms)   + a channel for events
               ├─ link "<name>.control" ── declare, depths        (opened at first use)
               ├─ link "<name>.consume" ── one per `consume` and `events`
               └─ link "<name>.receipts" ── one per `receipts`

Publishing and consuming never share a connection: an alarm blocks the connections of publishers, and consumers must continue to
drain the queues.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Self, TypeVar

from aio_pika import ExchangeType

from swarmq.broker import dead_queues, topology
from swarmq.broker.batch_publisher import open_receipts
from swarmq.broker.consumer import DEFAULT_ACK_S, open_consumer
from swarmq.broker.dead_queues import read_depths
from swarmq.broker.deliveries import (
    KEY_HEADER,
    QUEUE_HEADER,
    REASON_HEADER,
    SENDER_HEADER,
    Arrival,
    Deliveries,
    Delivery,
)
from swarmq.broker.events import EventEmitter, open_event_feed
from swarmq.broker.protocol import Depth, Receipts
from swarmq.broker.publisher import Publisher
from swarmq.broker.reconnect import BrokerLink
from swarmq.broker.session import Session
from swarmq.errors import BrokerError, BrokerLostError
from swarmq.messages import Event, Message, Rollout, encode, idempotency_key
from swarmq.runtime.amqp_urls import split_nodes
from swarmq.runtime.logs import log

LOGIN_PATIENCE_S = 30.0
OPEN_S = 10.0
BROKER_ANSWERED_ENV = "SWARMQ_BROKER_ANSWERED"
"""Environment variable that `swarmq up` sets for its daemons. It says that the broker has answered at this URL before, so a
daemon waits for it without a deadline."""
MAX_REASON_CHARS = 500
"""Maximum number of characters of a reason in a header."""

T = TypeVar("T")


def initial_connect_timeout_s() -> float | None:
    """Return the seconds a starting process waits for its broker; None means no deadline."""
    return None if os.environ.get(BROKER_ANSWERED_ENV) else OPEN_S


class AmqpBroker:
    """The RabbitMQ implementation of `Broker`; a process opens one and shares it."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        link: BrokerLink,
        stack: AsyncExitStack,
        user: str = "",
        default_ack_s: float = DEFAULT_ACK_S,
        login_patience_s: float = math.inf,
    ) -> None:
        self._url = url
        self._default_ack_s = default_ack_s
        self._login_patience_s = login_patience_s
        self._name = name
        self._stack = stack
        self._user = user
        self._publisher = Publisher(link, user=user)
        stack.callback(self._publisher.close)
        self._emitter = EventEmitter(link)
        self._control: BrokerLink | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        *,
        name: str,
        deadline_s: float | None = OPEN_S,
        user: str = "",
        default_ack_s: float = DEFAULT_ACK_S,
        login_patience_s: float = LOGIN_PATIENCE_S,
    ) -> AsyncIterator[Self]:
        """Connect, retrying an unreachable broker for `deadline_s` seconds a node, or without a deadline if None.

        Raises BrokerError at once for a malformed URL, a wrong password or an unknown vhost, and at the deadline.

        `name` shows in the management UI. `user` is the user in the URL if it belongs to an invited client (docs/how-to/access.md),
        else empty. `default_ack_s` is the assumed acknowledgement timeout where the server does not state one.
        `login_patience_s` is how long an invited client's login may be refused after it has worked once, before the client
        counts as removed.
        """
        nodes = split_nodes(url)
        patience_s = login_patience_s if user else math.inf
        link = BrokerLink(url, name=f"{name}.publish", login_patience_s=patience_s)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(link.keep())
            try:
                async with asyncio.timeout(deadline_s and deadline_s * len(nodes)):
                    await link.session()
            except TimeoutError:
                raise BrokerError(
                    link.trouble or "the broker closed the connection and cannot be reached again"
                ) from None
            yield cls(
                url,
                name=name,
                link=link,
                stack=stack,
                user=user,
                default_ack_s=default_ack_s,
                login_patience_s=patience_s,
            )

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        may_batch = isinstance(message, Rollout) or topology.parse_turns_run(queue)
        await self._publisher.publish(
            queue,
            encode(message),
            kind=str(message.__struct_config__.tag),
            headers={KEY_HEADER: idempotency_key(message)},
            deadline_s=deadline_s,
            batch_run=message.run if may_batch else "",
        )

    def consume(self, queue: str, *, prefetch: int) -> AbstractAsyncContextManager[Deliveries]:
        return open_consumer(
            self._url,
            queue,
            prefetch=prefetch,
            name=f"{self._name}.consume",
            bury=self._bury,
            default_ack_s=self._default_ack_s,
            login_patience_s=self._login_patience_s,
        )

    def read_stream(
        self, stream: str, *, prefetch: int, next_offset: Callable[[], int], skip: Callable[[int], None]
    ) -> AbstractAsyncContextManager[Deliveries]:
        """Read a stream from the offset that `next_offset` returns at the start and after every lost session. `skip` gets the offsets of
        messages that cannot be decoded. Raises UnroutableError if there is no such stream."""

        async def bury(arrival: Arrival, reason: str) -> None:
            log.warning("message_skipped", stream=arrival.queue, reason=reason[:MAX_REASON_CHARS])
            skip(int(arrival.headers[topology.STREAM_OFFSET]))
            with suppress(BrokerLostError):
                await arrival.settler.ack(arrival.tag, through=False)

        return open_consumer(
            self._url,
            stream,
            prefetch=prefetch,
            name=f"{self._name}.stream",
            bury=bury,
            default_ack_s=self._default_ack_s,
            next_offset=next_offset,
        )

    async def declare_stream(self, stream: str) -> None:
        """Declare a stream; idempotent."""

        async def declare(session: Session) -> None:
            await session.call(
                session.channel.declare_queue(stream, durable=True, arguments=topology.stream_arguments())
            )

        await self._until_done(declare)

    def receipts(self, book: str) -> AbstractAsyncContextManager[Receipts]:
        return open_receipts(self._url, book, name=self._name)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        if self._user:
            await self._refuse(delivery.arrival, reason)
            return
        await self._park(delivery.arrival, reason)
        await delivery.ack()

    async def is_blocked(self) -> bool:
        return await self._publisher.is_blocked()

    async def emit(self, *events: Event) -> bool:
        return await self._emitter.emit(*events)

    def events(
        self, run: str, *, senders: Sequence[str] = (), on_gap: Callable[[], None] = lambda: None
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return open_event_feed(
            self._url,
            [f"{run}.{sender}.#" for sender in senders] or [f"{run}.#"],
            name=f"{self._name}.events",
            on_gap=on_gap,
            may_declare=not self._user,
            login_patience_s=self._login_patience_s if self._user else math.inf,
        )

    async def declare(
        self,
        run: str,
        *,
        policies: Iterable[str],
        kinds: Iterable[str],
        replicas: int | None = None,
        turn_queues: int = 0,
    ) -> None:
        bound = list(kinds)
        queues = {
            topology.DEAD: topology.dead_letter_arguments(),
            **topology.run_queues(run, policies=policies, kinds=bound, replicas=replicas, turn_queues=turn_queues),
        }

        async def declare(session: Session) -> None:
            channel = session.channel
            await session.call(channel.declare_exchange(topology.EVENTS, ExchangeType.TOPIC, durable=True))
            await session.call(channel.declare_exchange(topology.DEAD, ExchangeType.FANOUT, durable=True))
            await session.call(channel.declare_exchange(topology.CLIENTS, ExchangeType.TOPIC, durable=True))
            for name, arguments in tuple(queues.items()):
                try:
                    await session.call(channel.declare_queue(name, durable=True, arguments=arguments))
                except BrokerError as error:
                    if topology.GROUP_SIZE not in str(error):
                        raise
                    log.warning("queue_keeps_its_group_size", queue=name, reason=str(error))
                    del queues[name]
                    raise session.lost_error() from error  # the refusal has closed the channel
            dead = await channel.get_queue(topology.DEAD, ensure=False)
            await session.call(dead.bind(topology.DEAD, routing_key=""))
            for key, name in topology.client_bindings(run, bound, turn_queues).items():
                queue = await channel.get_queue(name, ensure=False)
                await session.call(queue.bind(topology.CLIENTS, routing_key=key))
            for key, name in topology.obsolete_client_bindings(run, bound).items():
                queue = await channel.get_queue(name, ensure=False)
                await session.call(queue.unbind(topology.CLIENTS, routing_key=key))

        await self._until_done(declare)

    async def depths(self, queues: Sequence[str]) -> dict[str, Depth]:
        async def read(session: Session) -> dict[str, Depth]:
            return await session.call(read_depths(session.connection, queues))

        return await self._until_done(read)

    async def delete_if_dead(self, queue: str) -> bool:
        async def delete(session: Session) -> bool:
            return await dead_queues.delete_if_dead(session, self._url, queue, name=f"{self._name}.probe")

        return await self._until_done(delete)

    async def _bury(self, arrival: Arrival, reason: str) -> None:
        """Park a message that cannot be decoded.

        If the session is lost before the ack, the message is redelivered and parked twice.
        """
        if self._user:
            with suppress(BrokerLostError):
                await self._refuse(arrival, reason)
            return
        log.warning("message_dead_lettered", queue=arrival.queue, reason=reason[:MAX_REASON_CHARS])
        await self._park(arrival, reason)
        with suppress(BrokerLostError):
            await arrival.settler.ack(arrival.tag, through=False)

    async def _refuse(self, arrival: Arrival, reason: str) -> None:
        """Reject a message of an invited client's consumer, so that RabbitMQ parks it.

        Invited clients may not publish dead letters themselves; RabbitMQ vouches for the queue and the content. The reason is
        only in the client's log.
        """
        log.warning("message_rejected", queue=arrival.queue, reason=reason[:MAX_REASON_CHARS])
        await arrival.settler.reject(arrival.tag)

    async def _park(self, arrival: Arrival, reason: str) -> None:
        # Copy only the key of the sender's headers: others, e.g. CC, would use rights that the sender does not have.
        headers = {REASON_HEADER: reason[:MAX_REASON_CHARS], QUEUE_HEADER: arrival.queue}
        if key := arrival.headers.get(KEY_HEADER):
            headers[KEY_HEADER] = str(key)
        if arrival.sender:
            headers[SENDER_HEADER] = arrival.sender
        await self._publisher.publish(topology.DEAD, arrival.body, kind=arrival.kind, headers=headers, deadline_s=None)

    async def _until_done(self, work: Callable[[Session], Awaitable[T]]) -> T:
        if self._control is None:
            self._control = BrokerLink(self._url, name=f"{self._name}.control")
            await self._stack.enter_async_context(self._control.keep())
        while True:
            session = await self._control.session()
            with suppress(BrokerLostError):
                return await work(session)
