"""A proxy in this process: scripted engines, broker in memory, real HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession

from support.proxy import ROOT, Agent, served
from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.messages import Turn, decode
from swarmq.proxy.app import create_app
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

RUN = "r"


class Stage(Agent):
    """An agent, and everything behind the proxy it talks to."""

    engines: list[ScriptedEngine]
    broker: MemoryBroker

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    def turns(self) -> list[Turn]:
        return [decode(stored.body) for stored in self.broker.stored(topology.inbox(RUN))]


@asynccontextmanager
async def staged(*, engines: int = 1, **settings) -> AsyncIterator[Stage]:
    policy = {"model": "x", "sampling": {"temperature": 0.8, "max_tokens": 200}}
    job = SwarmJob.build({"run": RUN, "policies": {"main": policy, "other": policy}, "proxy": settings})
    broker = MemoryBroker()
    await broker.declare(RUN, policies=job.policies, kinds=job.mix)
    scripted = [ScriptedEngine(url=f"scripted://{i}") for i in range(engines)]
    app = create_app(job, root=ROOT, engines={"main": scripted, "other": scripted}, broker=broker, state_every_s=0.01)
    async with served(app) as url, ClientSession() as http:
        stage = Stage(url, RUN, http)
        stage.engines, stage.broker = scripted, broker
        yield stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as made:
        yield made


@pytest.fixture
def stages():
    """`async with stages(engines=2, confirm_timeout_s=0.1) as stage:` a stage with other settings."""
    return staged
