"""A run's name on a broker, held by one `swarmq up` for as long as it lives.

The claim is an exclusive queue: it lives with the connection that made it, so whoever dies lets go of the name at once,
and RabbitMQ itself refuses the second. After a lost connection it is claimed again.
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
    """Hold `run` for the block. Raises BrokerError when somebody else does."""

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
                "Choose another name, or stop that one"
            ) from error
        yield
