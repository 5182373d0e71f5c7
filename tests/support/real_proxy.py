"""A proxy in the test's process between a real vLLM and a real RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import ClientSession

from support.proxy import ROOT, Agent, served
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.config import SwarmJob
from swarmq.engine.client import VllmEngine
from swarmq.messages import Turn
from swarmq.proxy.app import create_app


class RealStage(Agent):
    """An agent, and everything behind the proxy it talks to."""

    engine: VllmEngine
    broker: AmqpBroker
    job: SwarmJob

    async def turns(self, count: int) -> list[Turn]:
        """The next turns of the inbox."""
        async with self.broker.consume(topology.inbox(self.run), prefetch=100) as deliveries:
            async with asyncio.timeout(60):
                found = []
                while len(found) < count:
                    delivery = await anext(deliveries)
                    found.append(delivery.message)
                    await delivery.ack()
            return found


@asynccontextmanager
async def real_stage(
    run: str, model: Path, *, engine_url: str, amqp_url: str, max_tokens: int, engine: type[VllmEngine] = VllmEngine
) -> AsyncIterator[RealStage]:
    policy = {"model": str(model), "sampling": {"max_tokens": max_tokens}}
    groups = {"group_size": 1, "min_group": 1}
    job = SwarmJob.build({"run": run, "policies": {"main": policy}, "groups": groups})
    async with (
        AmqpBroker.open(amqp_url, name="test proxy") as broker,
        engine.open(engine_url, deadline_s=60) as opened,
    ):
        await broker.declare(run, policies=job.policies, kinds=job.mix)
        app = create_app(job, root=ROOT, engines={"main": [opened]}, broker=broker)
        async with served(app) as url, ClientSession() as http:
            stage = RealStage(url, run, http)
            stage.engine, stage.broker, stage.job = opened, broker, job
            yield stage
