"""`swarmq feed` and `swarmq worker` with the same environments and no further options, on a real RabbitMQ, proxy and collector.

The engine plays: down on every lake, and sums right if they are even.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from pathlib import Path

import pytest

from support.proxy import ROOT, served
from swarmq import keys
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.client.data.tasks import strip_queue_id
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.environments import load_environment
from swarmq.messages import Command, Evaluation
from swarmq.proxy.http.app import create_app
from swarmq.testing.scripted_engine import ScriptedEngine, decode

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.broker

LAKE, SUMS = "gymnasium:FrozenLake-v1", "reasoning-gym:chain_sum"
TARGETS = {"lake": LAKE, "sums": SUMS}
GROUP, TASKS, HELD_OUT = 2, 3, 2
DOWN = 1


class Player(ScriptedEngine):
    async def generate(self, rendered, **how):
        text = decode(rendered.token_ids)
        terms = re.search(r"problem: (.*) =", text)
        answer = sum(int(term) for term in terms[1].replace("- ", "-").replace("+ ", "").split()) if terms else DOWN
        self.say(f"<answer>{answer + answer % 2}</answer>" if terms else f"I go {answer}.")
        async for deltas in super().generate(rendered, **how):
            yield deltas


async def swarmq(*words: object) -> str:
    """Run a command that must succeed and return its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarmq", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@contextlib.asynccontextmanager
async def run_of(run: str, folder: Path, url: str):
    """A run with a collector and a proxy, without a learner."""
    tree = {
        "run": run,
        "folder": str(folder),
        "broker": {"url": url},
        "mix": {"lake": 0.5, "sums": 0.5},
        "policies": {"main": {"model": "x"}},
        "groups": {"group_size": GROUP, "groups_per_batch": 2 * TASKS},
    }
    job, stop = SwarmJob.build(tree), asyncio.Event()
    job.run_folder.path.mkdir()
    job.run_folder.resolved.write_text(job.to_toml())
    job.run_folder.root_secret.write_bytes(ROOT)
    async with AmqpBroker.open(url, name="test", deadline_s=120.0) as broker:
        await broker.declare(run, policies=["main"], kinds=job.task_kinds)
        async with served(create_app(job, root=ROOT, engines={"main": [Player()]}, broker=broker)) as proxy:
            invite = keys.Invite(
                run=run,
                client="alice",
                secret=keys.derive_client_secret(ROOT, "alice"),
                amqp_url=url,
                base_url=f"{proxy}/v1",
                policies=("main",),
                kinds=job.task_kinds,
                group_size=GROUP,
            )
            job.run_folder.invite.write_text(invite.encode())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Collector(job, broker, Store(None, run=run)).run(stop))
                yield job.run_folder.path, broker
                stop.set()


@contextlib.asynccontextmanager
async def working(folder: Path):
    """A worker on both kinds, which must end well when it is stopped."""
    targets = [f"{kind}={target}" for kind, target in TARGETS.items()]
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmq", "worker", "--invite", folder, *targets
    )
    try:
        yield
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def play_lake(seed: int) -> tuple[float, int]:
    """Return what going down earns on a lake, and its number of steps."""
    game = gymnasium.make("FrozenLake-v1")
    game.reset(seed=seed)
    total, steps, over = 0.0, 0, False
    while not over:
        _, reward, terminated, truncated, _ = game.step(DOWN)
        total, steps, over = total + float(reward), steps + 1, terminated or truncated
    return total, steps


async def test_two_commands_train_and_evaluate_the_tasks_of_environments(run_name, tmp_path, amqp_url):
    async with run_of(run_name, tmp_path, amqp_url) as (folder, broker):
        fed = await asyncio.gather(
            *(swarmq("feed", folder, f"{kind}={target}", "--limit", TASKS) for kind, target in TARGETS.items()),
            *(
                swarmq("feed", folder, f"{kind}={target}", "--limit", HELD_OUT, "--eval")
                for kind, target in TARGETS.items()
            ),
        )
        assert fed[:2] == [f"published {TASKS * GROUP} slots\n"] * 2
        begin = Command(run=run_name, command_id="c", action="set", settings={"eval.every": 1})
        await broker.publish(topology.control(run_name), begin)
        async with working(folder):
            async with broker.consume(topology.ready(run_name, "main"), prefetch=100) as deliveries:
                trained = [(await anext(deliveries)).message for _ in range(2 * TASKS * GROUP)]
            async with broker.consume(topology.control(run_name, "main"), prefetch=9) as deliveries:
                async for delivery in deliveries:
                    if isinstance(evaluation := delivery.message, Evaluation):
                        break
    by_kind = {kind: {} for kind in TARGETS}
    for rollout in trained:
        by_kind[rollout.kind].setdefault(strip_queue_id(rollout.slot.task_id, rollout.kind), []).append(rollout)
    assert {len(attempts) for tasks in by_kind.values() for attempts in tasks.values()} == {GROUP}

    for seed in range(TASKS):
        for rollout in by_kind["lake"][f"FrozenLake-v1-{seed}"]:
            reward, steps = play_lake(seed)
            assert (rollout.reward, rollout.metrics["steps"], len(rollout.turns)) == (reward, steps, steps)
            assert rollout.metrics["illegal_actions"] == 0
    sums = {task["id"]: task for split in ("train", "eval") for task in load_environment(SUMS).tasks(split)}
    for name, attempts in by_kind["sums"].items():
        for rollout in attempts:
            assert (rollout.reward == 1.0) == (int(sums[name]["answer"]) % 2 == 0)
            assert rollout.metrics == {"score": rollout.reward, "answered": 1.0}

    kinds = evaluation.results["kinds"]
    assert {kind: (one["tasks"], one["episodes"]) for kind, one in kinds.items()} == dict.fromkeys(
        TARGETS, (HELD_OUT, HELD_OUT)
    )
    held_out = [task["seed"] for task in load_environment(LAKE).tasks("eval")][:HELD_OUT]
    assert kinds["lake"]["metrics"]["steps"] == sum(play_lake(seed)[1] for seed in held_out) / HELD_OUT
    assert kinds["sums"]["metrics"]["answered"] == 1.0
