"""Exactly-once publishing of a batch, even if the publisher dies in the middle of it.

    publish ──BCC──> queue             the broker puts the message into both or, from a dead publisher, into neither
               └───> <book>            one receipt per message; the next publisher reads them and sends only the rest
                     <book>.lock       exclusive: deleted once the broker has processed all that a dead publisher had sent

The caller records a finished batch itself and then calls `clear`. If the broker itself dies between the two queues, delivery is
at least once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from aio_pika.exceptions import DeliveryError, PublishError

from swarmq.broker import topology
from swarmq.broker.deliveries import KEY_HEADER
from swarmq.broker.publisher import Publisher, send_once
from swarmq.broker.reconnect import BrokerLink
from swarmq.broker.session import Session
from swarmq.errors import BrokerError, BrokerLostError, UnroutableError
from swarmq.messages import Message, encode, idempotency_key

COPY_HEADER = "BCC"
"""Header of RabbitMQ's sender-selected distribution: more routing keys, which the broker removes before delivery."""


@asynccontextmanager
async def open_receipts(url: str, book: str, *, name: str) -> AsyncIterator[AmqpReceipts]:
    """Open the named receipts for this process alone; wait while another process holds them."""
    found = AmqpReceipts(book)
    link = BrokerLink(url, name=f"{name}.receipts", prepare=found.prepare)
    found.link = link
    async with link.keep():
        await link.session()
        yield found


class AmqpReceipts:
    """The RabbitMQ implementation of `swarmq.broker.protocol.Receipts`."""

    link: BrokerLink

    def __init__(self, book: str) -> None:
        self._book = book
        self._known: set[str] = set()

    async def prepare(self, session: Session) -> None:
        """Take the lock and read the receipts; runs on every new connection."""
        channel = session.channel
        try:
            await session.call(channel.declare_queue(f"{self._book}.lock", exclusive=True))
        except BrokerError as error:
            if "RESOURCE_LOCKED" in str(error):
                raise BrokerLostError(f"{self._book} is in use by another process; waiting until it ends") from error
            raise
        await session.call(channel.declare_queue(self._book, durable=True, arguments=topology.dead_letter_arguments()))
        self._known = await session.call(_read_keys(session, self._book))

    async def publish(self, queue: str, messages: Sequence[Message]) -> None:
        left = {idempotency_key(message): message for message in messages}
        while left := {key: message for key, message in left.items() if key not in self._known}:
            session = await self.link.session()
            await _require_queue(session, queue)
            with suppress(BrokerLostError):  # the next session reads the receipts of this one
                await self._send(session, queue, left)
                return

    async def clear(self) -> None:
        self._known.clear()
        with suppress(BrokerLostError):  # old receipts name messages that are never sent again
            session = await self.link.session()
            await session.call(_purge(session, self._book))

    async def close(self) -> None:
        with suppress(BrokerLostError):
            session = await self.link.session()
            await session.call(session.channel.queue_delete(self._book))

    async def _send(self, session: Session, queue: str, messages: dict[str, Message]) -> None:
        full: list[tuple[str, Message]] = []

        async def one(key: str, message: Message) -> None:
            headers = {KEY_HEADER: key, COPY_HEADER: [self._book]}
            try:
                await session.call(_publish(session, queue, message, headers))
            except PublishError as error:
                raise UnroutableError(
                    f"no queue {queue}: it was deleted during the batch; publish again once the collector has declared it"
                ) from error
            except DeliveryError:
                full.append((key, message))

        try:
            async with asyncio.TaskGroup() as sending:
                for key, message in messages.items():
                    sending.create_task(one(key, message))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # all have the same cause
        if full:
            await self._send_to_full(queue, full)

    async def _send_to_full(self, queue: str, rejected: list[tuple[str, Message]]) -> None:
        """Forget all receipts, then publish the rejected messages without receipts.

        The receipts queue may have accepted a message that the target queue rejected. A false receipt would lose a task; a
        missing receipt can at worst duplicate one.
        """
        await self.clear()
        publisher = Publisher(self.link)
        for key, message in rejected:
            await publisher.publish(
                queue, encode(message), kind=_kind(message), headers={KEY_HEADER: key}, deadline_s=None
            )


async def _publish(session: Session, queue: str, message: Message, headers: dict[str, Any]) -> None:
    await send_once(session, queue, encode(message), kind=_kind(message), headers=headers)


async def _require_queue(session: Session, queue: str) -> None:
    """Raise UnroutableError if `queue` does not exist. The broker would not report it: the copy in the receipts queue counts as
    routed."""
    try:
        await session.call(session.channel.declare_queue(queue, passive=True))
    except UnroutableError as error:
        raise UnroutableError(f"no queue {queue} at {session.where}: check the run's name and the kind") from error


async def _read_keys(session: Session, book: str) -> set[str]:
    channel = await session.connection.channel(publisher_confirms=False)
    queue = await channel.get_queue(book, ensure=False)
    keys: set[str] = set()
    while (message := await queue.get(fail=False)) is not None:
        keys.add(str(message.headers.get(KEY_HEADER, "")))
    await channel.close()  # the receipts return to the book
    return keys


async def _purge(session: Session, book: str) -> None:
    await (await session.channel.get_queue(book, ensure=False)).purge()


def _kind(message: Message) -> str:
    return str(message.__struct_config__.tag)
