"""A proxy in the test's process between a real vLLM and a real RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from support.engine import SECRET
from support.proxy import ROOT, Agent, served
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.config import SwarmJob
from swarmq.engine.client.vllm import VllmEngine
from swarmq.messages import Turn
from swarmq.proxy.http.app import create_app

PATIENCE_S = 600.0
"""For all that would be a failure on a machine that has nothing else to do."""


class RealStage(Agent):
    """An agent, and everything behind the proxy it talks to."""

    engine: VllmEngine
    broker: AmqpBroker
    job: SwarmJob

    async def turns(self, count: int) -> list[Turn]:
        """The next turns of the inbox; one that is delivered again is the same turn."""
        async with self.broker.consume(topology.inbox(self.run), prefetch=100) as deliveries:
            async with asyncio.timeout(PATIENCE_S):
                found: dict[str, Turn] = {}
                while len(found) < count:
                    delivery = await anext(deliveries)
                    if isinstance(delivery.message, Turn):
                        found.setdefault(delivery.key, delivery.message)
                    await delivery.ack()
            return list(found.values())


@asynccontextmanager
async def real_stage(
    run: str,
    model: Path,
    *,
    engine_url: str,
    amqp_url: str,
    max_tokens: int,
    engine: type[VllmEngine] = VllmEngine,
    frozen: Mapping[str, tuple[Path, str]] | None = None,
    keep_cache: bool = False,
) -> AsyncIterator[RealStage]:
    """`frozen`: policy -> model and engine url of those beside `main` that are not trained."""
    policy = {"model": str(model), "sampling": {"max_tokens": max_tokens}, "engine": {"keep_cache": keep_cache}}
    frozen = frozen or {}
    untrained = {name: {**policy, "model": str(path), "trained": False} for name, (path, _) in frozen.items()}
    policies = {"main": policy, **untrained}
    groups = {"group_size": 1, "min_group": 1}
    proxy = {"confirm_timeout_s": PATIENCE_S}
    job = SwarmJob.build({"run": run, "policies": policies, "groups": groups, "proxy": proxy})
    async with (
        AmqpBroker.open(amqp_url, name="test proxy", deadline_s=PATIENCE_S) as broker,
        AsyncExitStack() as stack,
    ):
        engines = {}
        for name, url in {"main": engine_url, **{name: url for name, (_, url) in frozen.items()}}.items():
            engines[name] = opened = await stack.enter_async_context(
                engine.open(url, deadline_s=PATIENCE_S, secret=SECRET)
            )
            opened._lookup = opened._brief = ClientTimeout(total=PATIENCE_S)
        await broker.declare(run, policies=job.policies, kinds=job.mix)
        app = create_app(job, root=ROOT, engines={name: [opened] for name, opened in engines.items()}, broker=broker)
        # vLLM closes connections that are idle for a few seconds: none is used again.
        async with served(app) as url, ClientSession(connector=TCPConnector(keepalive_timeout=0)) as http:
            stage = RealStage(url, run, http)
            stage.engine, stage.broker, stage.job = engines["main"], broker, job
            yield stage
