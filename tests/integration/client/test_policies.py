"""Several policies in one episode: through the real proxy, RabbitMQ and collector, each learner gets its part, or none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from support.proxy import ROOT, served
from swarmq import AsyncEpisode, AsyncSwarmClient, keys
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.collector.ledger import read_fates
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.errors import EpisodeError, OutcomeError
from swarmq.learner.methods.credit import compute_advantages
from swarmq.messages import Rollout
from swarmq.proxy.http.app import create_app
from swarmq.testing.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker

TRAINED, FROZEN = ("planner", "executor"), "judge"


class Run:
    """A run with two trained policies of different models and a frozen one, and a client of it."""

    def __init__(self, job: SwarmJob, broker: AmqpBroker, client: AsyncSwarmClient, http: ClientSession) -> None:
        self.job, self.broker, self.client, self.http = job, broker, client, http

    async def ask(self, ep: AsyncEpisode, policy: str, text: str, *, agent: str = "") -> str:
        headers = {"authorization": f"Bearer {ep.api_key}"} | ({"x-swarmq-agent": agent} if agent else {})
        body = {"model": policy, "messages": [{"role": "user", "content": text}]}
        async with self.http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return str(answer["choices"][0]["message"]["content"])

    async def ready(self, policy: str, count: int) -> list[Rollout]:
        async with self.broker.consume(topology.ready(self.job.run, policy), prefetch=100) as deliveries:
            found = []
            while len(found) < count:
                delivery = await anext(deliveries)
                assert isinstance(delivery.message, Rollout)
                found.append(delivery.message)
                await delivery.ack()
            return sorted(found, key=lambda made: made.slot.repeat)


@contextlib.asynccontextmanager
async def running(amqp_url: str, run_name: str, folder: Path) -> AsyncIterator[Run]:
    policy = {"model": "x", "sampling": {"max_tokens": 64}}
    job = SwarmJob.build(
        {
            "run": run_name,
            "folder": str(folder),
            "policies": dict.fromkeys(TRAINED, policy) | {FROZEN: policy | {"trained": False}},
            "groups": {"group_size": 2, "groups_per_batch": 1},
        }
    )
    engines = {name: [ScriptedEngine(url=f"scripted://{name}")] for name in job.policies}
    for name, (engine,) in engines.items():
        for number in range(8):
            engine.say(f"{name} says {number}")
    job.run_folder.path.mkdir(parents=True)
    job.run_folder.root_secret.write_bytes(ROOT)
    stop = asyncio.Event()
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=120.0) as broker, asyncio.TaskGroup() as tasks:
        await broker.declare(job.run, policies=TRAINED, kinds=job.mix)
        store = Store(job.run_folder.inbox, run=job.run)
        tasks.create_task(Collector(job, broker, store).run(stop))
        app = create_app(job, root=ROOT, engines=engines, broker=broker)
        async with served(app) as url, ClientSession() as http:
            invite = keys.Invite(
                run=job.run,
                client="alice",
                secret=keys.derive_client_secret(ROOT, "alice"),
                amqp_url=amqp_url,
                base_url=f"{url}/v1",
                policies=tuple(job.policies),
                kinds=tuple(job.mix),
                group_size=2,
                frozen=job.frozen,
            )
            async with AsyncSwarmClient(invite, spool=folder / "spool") as client:
                yield Run(job, broker, client, http)
        stop.set()
    store.close()


async def test_one_end_rewards_every_policy_and_each_learner_gets_its_own_turns(amqp_url, run_name, tmp_path):
    async with running(amqp_url, run_name, tmp_path) as run:
        for number in range(2):
            async with run.client.episode({"id": "t"}, policies=[*TRAINED, FROZEN]) as ep:
                plan = await run.ask(ep, "planner", "plan")
                await run.ask(ep, "executor", plan, agent="writer")
                await run.ask(ep, "executor", "check", agent="tester")
                await run.ask(ep, FROZEN, "is it good?")
                await ep.end(
                    rewards={"planner": float(number), "executor": 0.5},
                    agent_rewards={"executor": {"writer": float(number), "tester": 1.0 - number}},
                )
        planners, executors = await run.ready("planner", 2), await run.ready("executor", 2)
        assert [e.reward for e in planners] == [0.0, 1.0]
        assert {turn.policy for e in planners for turn in e.turns} == {"planner"}
        assert [turn.agent for turn in executors[0].turns] == ["writer", "tester"]
        assert {turn.policy for e in executors for turn in e.turns} == {"executor"}
        credit = compute_advantages([executors], run.job.policies["executor"].train)
        assert credit[executors[1].episode_id] == [1.0, -1.0], "roles of one policy are credited apart"
        assert list(await run.broker.depths([topology.ready(run.job.run, FROZEN)])) == [], "nobody trains the judge"


async def test_an_end_that_lacks_a_reward_ends_nothing(amqp_url, run_name, tmp_path):
    async with running(amqp_url, run_name, tmp_path) as run:
        async with run.client.episode({"id": "t"}, policies=TRAINED, group_size=1) as ep:
            await run.ask(ep, "planner", "plan")
            await run.ask(ep, "executor", "do")
            with pytest.raises(OutcomeError, match="rewards has nothing for executor"):
                await ep.end(rewards={"planner": 1.0})
            with pytest.raises(OutcomeError, match="rewards names 'judge'"):
                await ep.end(rewards={"planner": 1.0, "executor": 1.0, "judge": 1.0})
            assert {fate.state for fate in read_fates(run.job.run_folder.inbox).values()} <= {"open"}
            await ep.end(rewards={"planner": 1.0, "executor": 0.0})
        with pytest.raises(
            EpisodeError, match="policies: writer given; the run's policies are planner, executor, judge"
        ):
            await run.client.begin_episode({"id": "t"}, policies=["writer"])


async def test_a_policy_that_an_episode_did_not_name_cannot_be_called_with_its_key(amqp_url, run_name, tmp_path):
    async with running(amqp_url, run_name, tmp_path) as run:
        ep = await run.client.begin_episode({"id": "t"}, policies=["planner"])
        body = {"model": "executor", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {ep.api_key}"}
        async with run.http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers) as response:
            assert response.status in {403, 404}
        await ep.abort("enough")
