"""What RabbitMQ's management API tells of a run's queues, from which the recorder knows how long messages wait."""

from __future__ import annotations

import asyncio

import pytest

from swarmq.broker import topology
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import AmqpBroker
from swarmq.messages import Ticket

pytestmark = pytest.mark.broker


async def test_queues_tell_how_many_messages_ever_came(broker_node, run_name):
    api = ManagementApi.of(broker_node.amqp_url, broker_node.identity.management_login)
    queue = topology.tickets(run_name, "math")
    async with AmqpBroker.open(broker_node.amqp_url, name="test", deadline_s=120.0) as broker:
        await broker.declare(run_name, policies=["main"], kinds=["math"])
        for number in range(3):
            await broker.publish(queue, Ticket(run=run_name, ticket_id=str(number), kind="math"))
        async with broker.consume(queue, prefetch=1) as deliveries:
            await (await anext(deliveries)).ack()
        async with asyncio.timeout(60):
            while True:  # its figures are some seconds late
                figures = await asyncio.to_thread(api.queue_figures, f"swarmq.{run_name}.")
                if figures[queue].published == 3 and figures[queue].ready == 2:
                    break
                await asyncio.sleep(0.2)
    assert figures[topology.inbox(run_name)].published == 0
    assert all(name.startswith(f"swarmq.{run_name}.") for name in figures)
