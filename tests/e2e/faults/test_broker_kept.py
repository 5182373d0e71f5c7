"""`swarmq up` brings its private RabbitMQ back when that dies."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from support.broker import discarded
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.messages import Ticket
from swarmq.up.supervision import keep_broker

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_killed_private_broker_is_back_at_the_same_url_with_its_messages(tmp_path):
    warnings: list[str] = []
    async with (
        discarded(PrivateNode(tmp_path)) as node,
        AmqpBroker.open(node.amqp_url, name="test", deadline_s=None) as broker,
    ):
        await broker.declare("r", policies=["main"], kinds=["math"])
        await broker.publish(topology.tickets("r", "math"), Ticket(run="r", ticket_id="t1", kind="math"))
        keeper = asyncio.create_task(keep_broker(node, warnings.append))
        os.kill(node.pids[0], signal.SIGKILL)
        await broker.publish(topology.tickets("r", "math"), Ticket(run="r", ticket_id="t2", kind="math"))
        async with broker.consume(topology.tickets("r", "math"), prefetch=5) as deliveries:
            found = {(await anext(deliveries)).message.ticket_id for _ in range(2)}
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    assert found == {"t1", "t2"}
    assert warnings == [f"the broker died with status {-signal.SIGKILL}; restarting"]
