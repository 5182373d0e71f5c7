"""The broker interface. `AmqpBroker` implements it on RabbitMQ, `swarmq.testing.MemoryBroker` in memory for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from swarmq.broker.deliveries import Deliveries, Delivery
from swarmq.messages import Event, Message

if TYPE_CHECKING:
    from swarmq.config import SwarmJob


class Depth(NamedTuple):
    """Numbers of messages and consumers of a queue."""

    ready: int
    """Number of messages that wait for delivery, a batch counted once; delivered messages without an acknowledgement are not counted."""
    consumers: int


class Receipts(Protocol):
    """A batch publisher that sends each message exactly once, even if it is killed and another process continues; see
    `Broker.receipts`."""

    async def publish(self, queue: str, messages: Sequence[Message]) -> None:
        """Publish all messages that have no receipt, and return when they are confirmed. Raises UnroutableError."""

    async def clear(self) -> None:
        """Forget all receipts; the caller has recorded elsewhere that these messages are published."""

    async def close(self) -> None:
        """Delete the receipts when no process will continue the batch."""


class Broker(Protocol):
    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        """Return once the broker has confirmed that `message` is durably in `queue`.

        Lost connections are retried under the same idempotency key until the broker confirms or `deadline_s` seconds have
        passed. Raises UnconfirmedError at the deadline (the message may be in the queue), UnroutableError if there is no such
        queue, MessageError if the message is too large, BrokerError if the broker refuses the client.
        """

    def consume(self, queue: str, *, prefetch: int) -> AbstractAsyncContextManager[Deliveries]:
        """Consume `queue` with at most `prefetch` unacknowledged deliveries. Raises UnroutableError if there is no such queue."""

    def receipts(self, book: str) -> AbstractAsyncContextManager[Receipts]:
        """Open receipts by name. One process holds them at a time; they persist after the holder's end."""

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Park an unusable message in the queue `swarmq.dead`, with the reason, and acknowledge it."""

    async def is_blocked(self) -> bool:
        """Return whether publishers wait because the broker is low on memory or disk; False if the broker is away."""

    async def emit(self, *events: Event) -> bool:
        """Publish events of one source in their order, and return whether they were sent. Best effort: events are dropped when the
        broker is away or blocked; never raises, never blocks long."""

    def events(
        self, run: str, *, senders: Sequence[str] = (), on_gap: Callable[[], None] = lambda: None
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Subscribe to the events of a run from now on. `senders`: first words of the sources, e.g. "proxy"; without any, events of all
        sources. `on_gap`: called when the subscription is lost, because events may have been missed."""

    async def declare(
        self,
        run: str,
        *,
        policies: Iterable[str],
        kinds: Iterable[str],
        replicas: int | None = None,
        turn_queues: int = 0,
    ) -> None:
        """Declare all queues of a run; idempotent. `replicas`: number of nodes of a cluster that hold each new queue. `turn_queues`:
        number of queues of turns."""

    async def depths(self, queues: Sequence[str]) -> dict[str, Depth]:
        """Return the depth of each queue that exists."""

    async def delete_if_dead(self, queue: str) -> bool:
        """Delete a dead queue and return True; return False for a queue that works or does not exist.

        A crash in the middle of a deletion leaves a dead queue behind: the broker lists it as empty, but confirms nothing and
        delivers nothing.
        """


async def declare_run(broker: Broker, job: SwarmJob) -> None:
    """Declare all queues of the run of a job; idempotent."""
    await broker.declare(
        job.run,
        policies=job.trained,
        kinds=job.task_kinds,
        replicas=job.broker.replicas,
        turn_queues=job.collector.turn_queues,
    )
