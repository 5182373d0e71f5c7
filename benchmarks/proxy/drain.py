"""Takes turns from the inbox as a collector takes them, as a process: `python -m benchmarks.proxy.drain AMQP_URL RUN`."""

from __future__ import annotations

import asyncio
import sys

from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker


async def drain(url: str, run: str) -> None:
    async with (
        AmqpBroker.open(url, name="proxy benchmark") as broker,
        broker.consume(topology.inbox(run), prefetch=500) as deliveries,
    ):
        async for delivery in deliveries:
            await delivery.ack()


if __name__ == "__main__":
    asyncio.run(drain(*sys.argv[1:]))
