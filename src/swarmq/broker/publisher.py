"""Publishing: persistent, confirmed, mandatory, and retried under the same idempotency key until confirmed.

Publishes share one channel and await their confirms separately, so that concurrent calls pipeline. To queues with one consumer,
concurrent calls share messages (message_batches.py).
"""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

from aio_pika import DeliveryMode
from aio_pika import Message as AmqpMessage
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import DeliveryError, PublishError
from aiormq import spec

from swarmq.broker import topology
from swarmq.broker.deliveries import KEY_HEADER
from swarmq.broker.message_batches import BatchingPublisher
from swarmq.broker.reconnect import BrokerLink
from swarmq.broker.session import RECYCLED_PREFIX, Session
from swarmq.errors import BrokerLostError, UnconfirmedError, UnroutableError
from swarmq.messages import PackedMessage
from swarmq.runtime.logs import log
from swarmq.version import __version__

IN_FLIGHT = 512
"""Maximum number of unconfirmed publishes. The driver scans all of them for every confirm that covers several."""

MAX_FULL_DELAY_S = 1.0
"""Maximum seconds until a message is published again that the broker rejected because a policy limits the queue's length."""

WARN_EVERY_S = 60.0
"""Seconds between two warnings for one queue. A full queue accepts and rejects messages in turn."""

REJECTED_S = 2.0
"""Seconds of rejections after which a session with a node of a cluster is renewed: a channel that was opened while a queue's leader
was down rejects all messages to that queue, and only a new channel finds the new leader."""

POLL_S = 0.05
UNBOUND_KEY = "swarmq.nobody"
"""Routing key to which no queue is bound."""

APP_ID = f"swarmq/{__version__}"
CONTENT_TYPE = "application/msgpack"


class Publisher:
    def __init__(self, link: BrokerLink, *, user: str = "") -> None:
        """`user` is the invited client, which may write only to the clients' exchange; empty for an operator."""
        self._link = link
        self._user = user
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._warned: dict[str, float] = {}
        self._rejected_since: dict[str, float] = {}
        self._batching: dict[str, BatchingPublisher] = {}
        """Queue -> its publisher of batches."""

    def close(self) -> None:
        for batching in self._batching.values():
            batching.close()

    async def publish(
        self,
        queue: str,
        body: bytes,
        *,
        kind: str,
        headers: dict[str, Any],
        deadline_s: float | None,
        batch_run: str = "",
    ) -> None:
        """Publish `body` to `queue`, and return after the confirm. Raises UnroutableError, UnconfirmedError at the deadline,
        BrokerError when refused. `batch_run`: the run, if the message may share a batch."""
        try:
            async with asyncio.timeout(deadline_s):
                if batch_run:
                    await self._find_batching(batch_run, queue).publish(
                        PackedMessage(kind, str(headers.get(KEY_HEADER, "")), body)
                    )
                else:
                    async with self._slots:
                        while not await self._attempt(queue, body, kind=kind, headers=headers):
                            pass
        except TimeoutError as error:
            trouble = self._link.trouble or (
                "it is blocked by a memory or disk alarm, or overloaded, or the queue lacks a majority of its nodes"
            )
            raise UnconfirmedError(
                f"RabbitMQ has not confirmed {kind} {headers.get(KEY_HEADER, '')} to {queue} within {deadline_s:g} s: {trouble}"
            ) from error

    def _find_batching(self, run: str, queue: str) -> BatchingPublisher:
        async def attempt(message: PackedMessage) -> bool:
            return await self._attempt(queue, message.body, kind=message.kind, headers={KEY_HEADER: message.key})

        if queue not in self._batching:
            self._batching[queue] = BatchingPublisher(run, attempt)
        return self._batching[queue]

    async def is_blocked(self) -> bool:
        """Return whether the broker blocks publishers.

        RabbitMQ tells only connections that publish, so this publishes a message that reaches no queue.
        """
        if (session := self._link.current) is None:
            return False
        asking = asyncio.create_task(session.call(_probe_blocking(session.channel)))
        try:
            while not (blocked := await session.is_blocked()) and not asking.done():
                await asyncio.wait({asking}, timeout=POLL_S)
            return blocked
        finally:
            asking.cancel()
            asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def _attempt(self, queue: str, body: bytes, *, kind: str, headers: dict[str, Any]) -> bool:
        """Publish once and return whether the broker confirmed; the caller retries after False."""
        session = await self._link.session()
        try:
            await session.call(send_once(session, queue, body, kind=kind, headers=headers, user=self._user))
        except BrokerLostError:
            return False
        except PublishError as error:
            raise UnroutableError(
                f"no queue {queue} at {session.where}: check the run's and the policy's name, or start the run there"
            ) from error
        except DeliveryError:
            await self._wait_for_room(queue, session)
            return False
        self._rejected_since.pop(queue, None)
        return True

    async def _wait_for_room(self, queue: str, session: Session) -> None:
        now = asyncio.get_running_loop().time()
        if session.is_in_cluster and now - self._rejected_since.setdefault(queue, now) >= REJECTED_S:
            self._rejected_since[queue] = now
            session.fail(f"{RECYCLED_PREFIX}: {queue} has rejected messages for {REJECTED_S:g} s")
            return
        if now - self._warned.get(queue, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned[queue] = now
            reason = {"reason": f"it is full, or {session.majority_hint}"} if session.is_in_cluster else {}
            log.warning("queue_full", queue=queue, **reason, action="publishing waits for room")
        await asyncio.sleep(random.uniform(0.1, MAX_FULL_DELAY_S))


async def _probe_blocking(channel: AbstractChannel) -> None:
    """Return when the broker accepts messages. The broker may confirm one message in the moment in which it blocks, so two are
    sent."""
    for _ in range(2):
        await channel.default_exchange.publish(AmqpMessage(b""), UNBOUND_KEY, mandatory=False)


async def send_once(
    session: Session, queue: str, body: bytes, *, kind: str, headers: dict[str, Any], user: str = ""
) -> None:
    """Publish a durable message to `queue` once and return after the confirm; no retry."""
    properties = spec.Basic.Properties(
        content_type=CONTENT_TYPE,
        delivery_mode=DeliveryMode.PERSISTENT,
        # Unique per attempt: the driver matches returned messages by id, and a duplicate id in flight would hide a missing queue.
        message_id=uuid.uuid4().hex,
        message_type=kind,
        app_id=APP_ID,
        headers=headers,
    )
    # The channel below aio-pika, whose wrapping of a message costs as much as sending it.
    await session.underlay.basic_publish(
        body,
        exchange=topology.CLIENTS if user else "",
        routing_key=topology.client_key(user, queue) if user else queue,
        properties=properties,
        mandatory=True,
        wait=False,  # the confirm says more than an empty send buffer, and the next message need not wait for it
    )
