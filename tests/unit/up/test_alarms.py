"""What holds up a whole run is said where it is up."""

from __future__ import annotations

import asyncio

from swarmq.testing import MemoryBroker
from swarmq.up.deployment import report_alarms


async def test_an_alarm_is_told_when_it_begins_and_when_it_is_over() -> None:
    broker, told = MemoryBroker(), asyncio.Queue[str]()
    async with asyncio.timeout(30):
        teller = asyncio.create_task(report_alarms(broker, told.put_nowait, every_s=0.001))
        broker.alarm(on=True)
        assert "RabbitMQ accepts no messages: it is low on memory or disk" in await told.get()
        broker.alarm(on=False)
        assert await told.get() == "RabbitMQ accepts messages again"
        assert told.empty()
    teller.cancel()
