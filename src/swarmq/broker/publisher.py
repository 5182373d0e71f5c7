"""Publishing: persistent, confirmed, mandatory, and again under the same key until confirmed.

Many publishes share one channel; their confirms are awaited apart, so concurrent calls pipeline.
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

from swarmq.broker import topology
from swarmq.broker.deliveries import KEY_HEADER
from swarmq.broker.reconnect import BrokerLink
from swarmq.errors import BrokerLostError, UnconfirmedError, UnroutableError
from swarmq.runtime.logs import log
from swarmq.version import __version__

IN_FLIGHT = 512
"""Unconfirmed publishes at a time. The driver looks at all of them for every confirm that covers several."""

MAX_FULL_DELAY_S = 1.0
"""Pause after the broker rejected a message, which it does when a length limit set by policy is reached."""

WARN_EVERY_S = 60.0
"""A full queue takes one message in, rejects the next, and so on: one warning per queue and minute is enough."""

POLL_S = 0.05
UNBOUND_KEY = "swarmq.nobody"
"""No queue has this name."""

APP_ID = f"swarmq/{__version__}"
CONTENT_TYPE = "application/msgpack"


class Publisher:
    def __init__(self, link: BrokerLink, *, user: str = "") -> None:
        """`user` is an invited client's, who may write to its own exchange alone; empty: an operator's."""
        self._link = link
        self._user = user
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._warned: dict[str, float] = {}

    async def publish(
        self, queue: str, body: bytes, *, kind: str, headers: dict[str, Any], deadline_s: float | None
    ) -> None:
        """Return after the confirm. Raises UnroutableError, UnconfirmedError at the deadline, BrokerError when refused."""
        try:
            async with asyncio.timeout(deadline_s), self._slots:
                while not await self._attempt(queue, body, kind=kind, headers=headers):
                    pass
        except TimeoutError as error:
            trouble = self._link.trouble or "it is blocked by an alarm or overloaded"
            raise UnconfirmedError(
                f"RabbitMQ has not confirmed {kind} {headers.get(KEY_HEADER, '')} to {queue} within {deadline_s:g} s: {trouble}"
            ) from error

    async def is_blocked(self) -> bool:
        """Whether the broker holds up what is published. It tells that to publishers alone, so something is published that reaches
        nobody."""
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
        """Whether it is confirmed; False asks for another attempt."""
        session = await self._link.session()
        try:
            await session.call(send_once(session.channel, queue, body, kind=kind, headers=headers, user=self._user))
        except BrokerLostError:
            return False
        except PublishError as error:
            raise UnroutableError(
                f"no queue {queue} at {session.where}: check the run's and the policy's name, or start the run there"
            ) from error
        except DeliveryError:
            await self._wait_for_room(queue)
            return False
        return True

    async def _wait_for_room(self, queue: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned.get(queue, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned[queue] = now
            log.warning("queue full, waiting", queue=queue)
        await asyncio.sleep(random.uniform(0.1, MAX_FULL_DELAY_S))


async def _probe_blocking(channel: AbstractChannel) -> None:
    """Return when the broker takes messages. It may confirm the first one in the moment in which it blocks, but not the second."""
    for _ in range(2):
        await channel.default_exchange.publish(AmqpMessage(b""), UNBOUND_KEY, mandatory=False)


async def send_once(
    channel: AbstractChannel, queue: str, body: bytes, *, kind: str, headers: dict[str, Any], user: str = ""
) -> None:
    """One attempt to put a durable message into `queue`; returns after the confirm."""
    message = AmqpMessage(
        body,
        content_type=CONTENT_TYPE,
        delivery_mode=DeliveryMode.PERSISTENT,
        # Unique per attempt: the driver matches returns by it, and two equal ones in flight hide a wrong name.
        message_id=uuid.uuid4().hex,
        type=kind,
        app_id=APP_ID,
        headers=headers,
    )
    if not user:
        await channel.default_exchange.publish(message, queue, mandatory=True)
        return
    exchange = await channel.get_exchange(
        topology.CLIENTS, ensure=False
    )  # looking would need more rights than to write
    await exchange.publish(message, topology.client_key(user, queue), mandatory=True)
