"""Batches: messages of one process to one queue that wait for each other's confirms travel as one AMQP message.

    publish ──> waiting ──if nothing is in flight, or a batch is full──> a message, or a MessageBatch ──confirm──> every publisher

An AMQP message with many records costs about as much as one with a single record. A message that finds nothing in flight goes out
at once and alone, so batches form only where messages come faster than the broker confirms them. Consumers get single messages
again (deliveries.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from swarmq.messages import MessageBatch, PackedMessage, encode_batch

MAX_MESSAGES = 64
"""Maximum number of messages in a batch."""

MAX_BYTES = 120 * 1024
"""Maximum bytes of the messages in a batch of several: RabbitMQ's largest frame by default (128 KiB), less the batch's own fields. The
collector prefetches a thousand AMQP messages into memory."""

MAX_IN_FLIGHT = 8
"""Maximum number of unconfirmed batches for one queue."""

KIND = str(MessageBatch.__struct_config__.tag)
"""AMQP message type of a batch."""


class _Waiting(NamedTuple):
    message: PackedMessage
    done: asyncio.Future[None]


class BatchingPublisher:
    """Publishes the messages to one queue, in their order."""

    def __init__(self, run: str, attempt: Callable[[PackedMessage], Awaitable[bool]]) -> None:
        """`run`: run to which the queue belongs. `attempt`: publishes a message once, and returns whether the broker confirmed it."""
        self._run = run
        self._attempt = attempt
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._in_flight: set[asyncio.Task[None]] = set()

    async def publish(self, message: PackedMessage) -> None:
        """Return after the confirm. A cancelled message is not sent (again). Raises the errors of `attempt`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(message, done))
        self._waiting_bytes += len(message.body)
        self._advance()
        await done

    def close(self) -> None:
        for task in self._in_flight:
            task.cancel()

    def _advance(self) -> None:
        while self._waiting and (
            not self._in_flight or (self._is_batch_full() and len(self._in_flight) < MAX_IN_FLIGHT)
        ):
            task = asyncio.create_task(self._send(self._take()))
            self._in_flight.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            self._advance()

    def _is_batch_full(self) -> bool:
        return len(self._waiting) >= MAX_MESSAGES or self._waiting_bytes >= MAX_BYTES

    def _take(self) -> list[_Waiting]:
        """Take the messages of a batch off the waiting ones."""
        taken: list[_Waiting] = []
        size_bytes = 0
        while self._waiting and len(taken) < MAX_MESSAGES:
            size_bytes += len(self._waiting[0].message.body)
            if taken and size_bytes > MAX_BYTES:
                break
            taken.append(self._waiting.popleft())
            self._waiting_bytes -= len(taken[-1].message.body)
        return taken

    async def _send(self, taken: Sequence[_Waiting]) -> None:
        """Send messages until the broker confirms or refuses them, or nobody waits for them."""
        error: Exception | None = None
        try:
            while left := [one.message for one in taken if not one.done.done()]:
                if await self._attempt(pack(self._run, left)):
                    break
        except Exception as refusal:
            error = refusal
        for one in taken:
            if not one.done.done():
                one.done.set_exception(error) if error else one.done.set_result(None)


def pack(run: str, messages: Sequence[PackedMessage]) -> PackedMessage:
    """Return a batch of the messages, or the only message itself."""
    if len(messages) == 1:
        return messages[0]
    batch = MessageBatch(run=run, messages=tuple(messages))
    return PackedMessage(KIND, f"{messages[0].key}+{len(messages) - 1}", encode_batch(batch))
