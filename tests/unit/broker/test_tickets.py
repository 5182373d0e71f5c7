"""The source of tickets, on a broker in memory: what those who wait hear, and a queue that goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from structlog.testing import capture_logs

from swarmq.broker import topology
from swarmq.broker.tickets import TicketSource
from swarmq.messages import Ticket
from swarmq.testing import MemoryBroker

RUN = "r1"
QUEUE = topology.tickets(RUN, "math")


async def declared() -> MemoryBroker:
    broker = MemoryBroker()
    await broker.declare(RUN, policies=["main"], kinds=["math"])
    return broker


async def issue(broker: MemoryBroker, count: int) -> None:
    for number in range(count):
        await broker.publish(QUEUE, Ticket(run=RUN, ticket_id=f"ticket-{number}", kind="math"))


@contextlib.asynccontextmanager
async def served(source: TicketSource) -> AsyncIterator[None]:
    serving = asyncio.ensure_future(source.serve())
    try:
        yield
    finally:
        serving.cancel()


async def take(source: TicketSource) -> str:
    async with source.ticket() as ticket:
        return ticket.ticket_id


async def test_a_long_wait_for_a_ticket_is_visible():
    broker = await declared()
    source = TicketSource(broker, QUEUE, "math", warn_s=0.0)
    with capture_logs() as warnings:
        async with served(source), asyncio.timeout(30):
            waiting = asyncio.ensure_future(take(source))
            while not warnings:  # noqa: ASYNC110 - the loop's timers warn
                await asyncio.sleep(0)
            await issue(broker, 1)
            await waiting
    assert (warnings[0]["event"], warnings[0]["kind"]) == ("waiting_for_ticket", "math")
    assert "none while the run is paused or drained" in warnings[0]["reason"]


async def test_of_many_who_wait_for_a_ticket_one_warns_and_counts_them():
    broker = await declared()
    source = TicketSource(broker, QUEUE, "math", warn_s=0.05)
    with capture_logs() as warnings:
        async with served(source), asyncio.timeout(30):
            waiting = [asyncio.ensure_future(take(source)) for _ in range(6)]
            while len(warnings) < 3:  # noqa: ASYNC110 - the loop's timers warn
                await asyncio.sleep(0.001)
            await issue(broker, 6)
            await asyncio.gather(*waiting)
    assert {(warning["event"], warning["waiting"]) for warning in warnings} == {("waiting_for_ticket", 6)}
    assert len(warnings) < 6, "the three of the first waiter, not one of each"


async def test_a_ticket_queue_that_was_there_and_was_deleted_is_waited_for():
    broker = await declared()
    source = TicketSource(broker, QUEUE, "math", linger_s=0.0, retry_s=0.0)
    async with served(source), asyncio.timeout(60):
        await issue(broker, 1)
        await take(source)
        while (await broker.depths([QUEUE]))[QUEUE].consumers:  # noqa: ASYNC110
            await asyncio.sleep(0)
        broker.delete(QUEUE)
        with capture_logs() as warnings:
            waiting = asyncio.ensure_future(take(source))
            while not warnings:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert warnings[0]["event"] == "ticket_queue_deleted"
        await broker.declare(RUN, policies=["main"], kinds=["math"])
        await issue(broker, 1)
        await waiting
