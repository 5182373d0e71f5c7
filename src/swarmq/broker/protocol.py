"""What swarmq needs of a message broker. `AmqpBroker` is the real one, `swarmq.testing.MemoryBroker` the scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from swarmq.broker.deliveries import Deliveries, Delivery
from swarmq.messages import Event, Message


class Depth(NamedTuple):
    """How full a queue is."""

    ready: int
    """Messages waiting, not counting those with a consumer and not yet acknowledged."""
    consumers: int


class Receipts(Protocol):
    """Publishes in batches, each message exactly once although publishers may be killed; see `Broker.receipts`."""

    async def publish(self, queue: str, messages: Sequence[Message]) -> None:
        """Return when all are confirmed. Those for which there is a receipt are not sent again. Raises UnroutableError."""

    async def clear(self) -> None:
        """Forget all receipts: the caller has noted elsewhere that these messages are out."""

    async def close(self) -> None:
        """Remove the book, when nobody will go on with it."""


class Broker(Protocol):
    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        """Return once the broker has confirmed that `message` is durably in `queue`.

        Sent again under the same idempotency key across lost connections, until confirmed or for `deadline_s`
        seconds. Raises UnconfirmedError at the deadline (the message may be in the queue), UnroutableError when
        there is no such queue, MessageError when the message is too large, BrokerError when we are refused.
        """

    def consume(self, queue: str, *, prefetch: int) -> AbstractAsyncContextManager[Deliveries]:
        """Deliveries of `queue`, at most `prefetch` of them unacknowledged. Raises UnroutableError: no such queue."""

    def receipts(self, book: str) -> AbstractAsyncContextManager[Receipts]:
        """A book of receipts by name, held by one process at a time, that outlives its holder."""

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Park a message that cannot be used in `swarmq.dead`, with the reason, and acknowledge it."""

    async def is_blocked(self) -> bool:
        """Whether publishers wait because the broker is low on memory or disk. False where it is away."""

    async def emit(self, event: Event) -> bool:
        """Tell whoever listens; whether the broker was there to be told. Best effort: dropped when it is away or takes no
        messages, never raises, never blocks long."""

    def events(self, run: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Events of a run from now on."""

    async def declare(self, run: str, *, policies: Iterable[str], kinds: Iterable[str]) -> None:
        """Make all queues of a run. Doing it again changes nothing."""

    async def depths(self, queues: Sequence[str]) -> dict[str, Depth]:
        """Depth of each queue; a queue that does not exist is left out."""

    async def delete_if_dead(self, queue: str) -> bool:
        """Delete a queue that the broker lists and cannot bring up, which a crash in the middle of its deletion leaves
        behind: it looks empty, confirms nothing and serves nobody. Whether it was one.
        """
