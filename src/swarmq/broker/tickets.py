"""The client's side of tickets, which limit concurrent episodes and set the task mix: no ticket, no episode.

    tickets.<kind> --prefetch 1--> serve() --grant--> the first waiting begin
                        ^                                   |
                        └────────── ack once EpisodeBegin is confirmed

The consumer is open only while a begin waits, and `linger_s` longer: a ticket held by an idle client would be missing in the
group of a busy one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from swarmq.broker.deliveries import Deliveries, Delivery
from swarmq.broker.protocol import Broker
from swarmq.errors import BrokerError, BrokerLostError, SwarmqError, UnroutableError
from swarmq.messages import Ticket
from swarmq.runtime.logs import log
from swarmq.runtime.slow_waits import FIRST_WARNING_S, if_first_waiter, warn_if_slow


class TicketGrant:
    """A ticket given to one begin; `used` tells whether the broker confirmed the begin."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.used: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class TicketSource:
    """First-come, first-served source of one kind's tickets. `serve` must run as a task."""

    def __init__(
        self,
        broker: Broker,
        queue: str,
        kind: str,
        *,
        linger_s: float = 2.0,
        retry_s: float = 1.0,
        warn_s: float = FIRST_WARNING_S,
    ) -> None:
        """`linger_s`: seconds that the consumer stays open after the last waiting begin. `retry_s`: seconds between two attempts to
        consume a deleted queue, which the collector declares again. `warn_s`: seconds of waiting until the first warning."""
        self._linger_s, self._retry_s, self._warn_s = linger_s, retry_s, warn_s
        self._broker = broker
        self._queue = queue
        self._kind = kind
        self._waiting: deque[asyncio.Future[TicketGrant]] = deque()
        self._has_waiter = asyncio.Event()
        self.group_size: int | None = None
        """Group size of the kind, from the newest ticket."""

    @contextlib.asynccontextmanager
    async def ticket(self, *, first: bool = False) -> AsyncIterator[Ticket]:
        """Wait for a ticket and hold it for the block; the ticket is consumed if the block succeeds. `first` skips the queue.
        Raises BrokerError."""
        grant = await self._grant(first=first)
        used = False
        try:
            yield grant.ticket
            used = True
        finally:
            if not grant.used.done():
                grant.used.set_result(used)

    async def serve(self) -> None:
        """Give tickets to waiting begins until cancelled.

        An error of the broker is raised in all waiting begins, and the next begin tries again. If a queue has worked and is
        then deleted, wait until it is back.
        """
        known = False
        while True:
            await self._has_waiter.wait()
            try:
                async with self._broker.consume(self._queue, prefetch=1) as deliveries:
                    known = True
                    await self._hand_out(deliveries)
            except BrokerError as error:
                if known and isinstance(error, UnroutableError):
                    log.warning(
                        "ticket_queue_deleted", queue=self._queue, action="requests for tickets wait until it is back"
                    )
                    await asyncio.sleep(self._retry_s)
                else:
                    self.refuse(error)

    def refuse(self, error: SwarmqError) -> None:
        """Raise `error` in all begins that wait now."""
        for waiter in list(self._waiting):
            self._forget(waiter)
            if not waiter.done():
                waiter.set_exception(error)

    async def _hand_out(self, deliveries: Deliveries) -> None:
        held: Delivery | None = None
        while await self._is_wanted():
            if held is None:
                held = await anext(deliveries)
            if not isinstance(held.message, Ticket):
                await self._broker.dead_letter(held, f"{type(held.message).__name__} on a ticket queue")
                held = None
                continue
            grant = self._give(held.message)
            if grant is not None and await grant.used:
                with contextlib.suppress(BrokerLostError):  # the ticket is redelivered and permits one more episode
                    await held.ack()
                held = None

    async def _grant(self, *, first: bool) -> TicketGrant:
        waiter: asyncio.Future[TicketGrant] = asyncio.get_running_loop().create_future()
        if first:
            self._waiting.appendleft(waiter)
        else:
            self._waiting.append(waiter)
        self._has_waiter.set()
        try:
            with warn_if_slow(
                "waiting_for_ticket",
                first_s=self._warn_s,
                kind=self._kind,
                now=if_first_waiter(waiter, self._waiting),
                reason="the collector issues tickets as the learner trains, and none while the run is paused or drained; "
                "`swarmq status` shows which it is",
            ):
                return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().used.set_result(False)  # granted and cancelled in the same moment
            self._forget(waiter)
            raise

    def _give(self, ticket: Ticket) -> TicketGrant | None:
        while self._waiting:
            self.group_size = ticket.group_size or self.group_size
            waiter = self._waiting[0]
            self._forget(waiter)
            if not waiter.done():
                waiter.set_result(grant := TicketGrant(ticket))
                return grant
        return None

    def _forget(self, waiter: asyncio.Future[TicketGrant]) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiter)
        if not self._waiting:
            self._has_waiter.clear()

    async def _is_wanted(self) -> bool:
        try:
            async with asyncio.timeout(self._linger_s):
                await self._has_waiter.wait()
        except TimeoutError:
            return False
        return True
