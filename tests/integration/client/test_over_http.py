"""A client that reaches nothing but two proxies, of which one dies, on a real RabbitMQ."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.proxy import ROOT, served
from swarmq import AsyncSwarmClient, keys
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.messages import Rollout
from swarmq.proxy.http.app import create_app
from swarmq.registries.proxies import ProxyRegistry
from swarmq.testing.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker
SIZE = 3


async def ask(client_episode: object) -> float:
    from swarmq.client.ask import ask_async

    await ask_async(client_episode, "hi")  # type: ignore[arg-type]
    return 1.0


async def test_a_group_is_trained_although_its_first_proxy_dies_and_its_size_was_not_known(
    amqp_url: str, run_name: str, tmp_path: Path
) -> None:
    tree = {
        "run": run_name,
        "folder": str(tmp_path),
        "policies": {"main": {"model": "x"}},
        "groups": {"group_size": SIZE, "groups_per_batch": 2, "max_staleness": 0},
    }
    job, stop = SwarmJob.build(tree), asyncio.Event()
    job.run_folder.path.mkdir()
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(AmqpBroker.open(amqp_url, name="test", deadline_s=120.0))
        await broker.declare(run_name, policies=["main"], kinds=job.task_kinds)
        stacks, urls, engines = [], [], []
        for number in range(2):
            stacks.append(await stack.enter_async_context(AsyncExitStack()))
            engines.append(ScriptedEngine())
            app = create_app(job, root=ROOT, engines={"main": [engines[-1]]}, broker=broker, number=number)
            urls.append(f"{await stacks[-1].enter_async_context(served(app))}/v1")
        ProxyRegistry(job.run_folder.proxies).write(urls)
        for engine in engines:
            for _ in range(2 * SIZE):
                engine.say("hello")
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(Collector(job, broker, Store(None, run=run_name)).run(stop))
        invite = keys.Invite(
            run=run_name,
            client="alice",
            secret=keys.derive_client_secret(ROOT, "alice"),
            amqp_url="",
            base_url=urls[0],
            base_urls=(urls[0],),
            policies=("main",),
            kinds=job.task_kinds,
            group_size=1,
        )
        client = await stack.enter_async_context(AsyncSwarmClient(invite, spool=tmp_path / "spool"))
        one = await client.begin_episode({"id": "a"}, mode="eval")
        await one.end(await ask(one))
        held = await client.begin_episode({"id": "warm"})
        assert client.group_size_of("default") == SIZE, "said by the answer"
        await ask(held)
        await stacks[0].aclose()  # a proxy is gone, with an episode open that it may have begun
        await held.end(1.0)
        await client.run_episodes_until_all_complete([{"id": "b"}], ask, progress=False, retry_pause_s=0.0)
        async with broker.consume(topology.ready(run_name, "main"), prefetch=9) as deliveries:
            got = [(await anext(deliveries)).message for _ in range(SIZE)]
        stop.set()
    assert all(isinstance(one, Rollout) and one.slot.task_id == "b" and one.group_members == SIZE for one in got)
    assert keys.verify(ROOT, one.api_key, run=run_name, now=time.time()).client == "alice"
