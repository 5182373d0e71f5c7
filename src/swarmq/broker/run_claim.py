"""A claim on a run's name at a broker, held by one `swarmq up` while it lives.

The claim is an exclusive queue. It is deleted with its connection, so a dead process releases the name at once, and RabbitMQ
refuses a second claim. After a lost connection the name is claimed again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarmq.broker import topology
from swarmq.broker.reconnect import BrokerLink
from swarmq.broker.session import Session
from swarmq.errors import BrokerError

LOCKED = "RESOURCE_LOCKED"


@asynccontextmanager
async def claim_run(url: str, run: str) -> AsyncIterator[None]:
    """Hold the name `run` while the context is open. Raises BrokerError if another process holds it."""

    async def claim(session: Session) -> None:
        await session.call(session.channel.declare_queue(topology.claim(run), exclusive=True, auto_delete=True))

    link = BrokerLink(url, name=f"up {run}.claim", prepare=claim)
    async with link.keep():
        try:
            await link.session()
        except BrokerError as error:
            if LOCKED not in str(error):
                raise
            raise BrokerError(
                f"run {run!r} is up, or starting, on this broker already: another `swarmq up` holds its name. "
                "Choose another name, or stop the other one"
            ) from error
        yield
