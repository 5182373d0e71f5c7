"""A proxy in this process between a real vLLM and a real RabbitMQ."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from support.proxy import ROOT, Agent, served
from swarmq.broker import AmqpBroker, topology
from swarmq.config import SwarmJob
from swarmq.engine.client import VllmEngine
from swarmq.messages import Turn
from swarmq.proxy.app import create_app


class Stage(Agent):
    """An agent, and everything behind the proxy it talks to."""

    engine: VllmEngine
    broker: AmqpBroker

    async def turns(self, count: int) -> list[Turn]:
        """The next turns of the inbox."""
        async with self.broker.consume(topology.inbox(self.run), prefetch=100) as deliveries:
            async with asyncio.timeout(120):
                found = []
                while len(found) < count:
                    delivery = await anext(deliveries)
                    found.append(delivery.message)
                    await delivery.ack()
            return found


@pytest.fixture
async def stage(engine_url: str, amqp_url: str, run_name: str, tiny_model: Path) -> AsyncIterator[Stage]:
    job = SwarmJob.build(
        {"run": run_name, "policies": {"main": {"model": str(tiny_model), "sampling": {"max_tokens": 24}}}}
    )
    async with (
        AmqpBroker.open(amqp_url, name="test proxy") as broker,
        VllmEngine.open(engine_url, deadline_s=60) as engine,
    ):
        await broker.declare(run_name, policies=job.policies, kinds=job.mix)
        app = create_app(job, root=ROOT, engines={"main": [engine]}, broker=broker)
        async with served(app) as url, ClientSession() as http:
            stage = Stage(url, run_name, http)
            stage.engine, stage.broker = engine, broker
            yield stage
