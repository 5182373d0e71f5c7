"""A proxy in this process: scripted engines, broker in memory, real HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from litestar import Litestar

from support.proxy import ROOT, Agent, served
from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.messages import Message, Turn, decode
from swarmq.proxy.completions.remote_images import RemoteImages
from swarmq.proxy.engines.pool import PoolTimings
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http.app import create_app
from swarmq.proxy.main import KEEP_S
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

RUN = "r"
NO_WAIT = PoolTimings(wait_s=0.0)


class Stage(Agent):
    """An agent, and everything behind the proxy it talks to."""

    engines: list[ScriptedEngine]
    broker: MemoryBroker
    job: SwarmJob
    app: Litestar
    episodes: EpisodeCache

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    def turns(self) -> list[Turn]:
        return [piece for piece in self.pieces() if isinstance(piece, Turn)]

    def pieces(self) -> list[Message]:
        """What the collector would read."""
        return [decode(stored.body) for stored in self.broker.stored(topology.inbox(RUN))]


@asynccontextmanager
async def staged(
    *,
    engines: int = 1,
    engine: type[ScriptedEngine] = ScriptedEngine,
    folder: str = "runs",
    sampling: Any = None,
    kinds: Any = None,
    number: int = 0,
    watchers: Any = (),
    frozen: bool = False,
    replays_routing: bool = False,
    keep_cache: bool = False,
    aliases: Any = (),
    broker: MemoryBroker | None = None,
    most_connections: int = 4096,
    engine_timings: PoolTimings = NO_WAIT,
    keep_s: int = KEEP_S,
    processes: int = 1,
    images: RemoteImages | None = None,
    **settings,
) -> AsyncIterator[Stage]:
    urls = [f"scripted://{i}" for i in range(engines)]
    policy = {
        "model": "x",
        "engine": {"urls": urls, "keep_cache": keep_cache},
        "sampling": {"temperature": 0.8, "max_tokens": 200, **(sampling or {})},
        "train": {"routing_replay": replays_routing},
    }
    tree = {
        "run": RUN,
        "folder": folder,
        "policies": {"main": {**policy, "aliases": list(aliases)}, "other": {**policy, "trained": not frozen}},
        "kinds": kinds or {},
        "collector": {"processes": processes},
    }
    job = SwarmJob.build({**tree, "proxy": {"probe_every_s": 0.02, **settings}})
    broker = broker or MemoryBroker()
    await broker.declare(RUN, policies=job.policies, kinds=job.mix, turn_queues=job.collector.turn_queues)
    scripted = [engine(url=url) for url in urls]

    @asynccontextmanager
    async def opener(url: str) -> AsyncIterator[ScriptedEngine]:
        scripted.append(engine(url=url))
        yield scripted[-1]

    episodes = EpisodeCache.of_job(job, number=number)
    given = {"main": scripted[:], "other": scripted[:]}
    app = create_app(
        job,
        root=ROOT,
        engines=given,
        broker=broker,
        state_every_s=0.01,
        episodes=episodes,
        opener=opener,
        number=number,
        watchers=watchers,
        engine_timings=engine_timings,
        images=images,
    )
    async with (
        served(app, settings=job.proxy, most_connections=most_connections, keep_s=keep_s) as url,
        ClientSession() as http,
    ):
        stage = Stage(url, RUN, http)
        stage.engines, stage.broker, stage.job, stage.app, stage.episodes = scripted, broker, job, app, episodes
        yield stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as made:
        yield made


@pytest.fixture
def stages():
    """`async with stages(engines=2, confirm_timeout_s=0.1) as stage:` a stage with other settings."""
    return staged


@pytest.fixture(scope="session")
def openai():
    """OpenAI's library. Slow to import: only who uses it does."""
    import openai

    return openai


@pytest.fixture(scope="session")
def anthropic():
    """Anthropic's library, as `openai`."""
    import anthropic

    return anthropic
