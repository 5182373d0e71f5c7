"""What a standby costs the collector: finished episodes per second with and without one, in pairs of passes on the same broker.

Feeders publish the messages of many episodes as fast as the broker takes them, the collector's process commits them and publishes
rollouts, and this process takes and reports these. The time counts from the first batch of rollouts to the last. With a standby, a
second collector's process follows, as it would on another host. Only with more cores than processes (feeders, broker, two
collectors, this one) do feeders keep up; the leader's processor time tells the cost elsewhere, too. Example:

    python -m benchmarks.hosts.collectors --episodes 1600 --pairs 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks import report
from benchmarks.collector import GROUP_SIZE, traffic
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.config import SwarmJob
from swarmq.messages import EpisodeBegin, Message, Rollout, StepReport, Turn
from swarmq.runtime.processes import die_with_parent

SPAWN = multiprocessing.get_context("spawn")
BATCH = 8 * GROUP_SIZE
"""Episodes of a step."""
WINDOW = 500
"""Messages that a feeder publishes at the same time."""


class Pass(NamedTuple):
    episodes_per_s: float
    episodes_per_cpu_s: float
    """By the processor time of the leading collector."""


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=1600)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a turn, half of them sampled")
    parser.add_argument("--feeders", type=int, default=4, help="processes that publish")
    parser.add_argument("--pairs", type=int, default=5, help="passes of each kind, in turns")
    arguments = parser.parse_args()
    passes = asyncio.run(measure(arguments))
    rows, figures = [], {}
    for name, standby in (("alone", False), ("with a standby", True)):
        speed = report.Spread.of(one.episodes_per_s for one in passes[standby])
        cpu = report.Spread.of(one.episodes_per_cpu_s for one in passes[standby])
        rows += [[name, "episodes per s", *speed[:3]], [name, "per CPU s of the leader", *cpu[:3]]]
        figures["standby_episodes_per_s" if standby else "collector_episodes_per_s_1"] = speed.median
    ratio = report.Spread.of(
        there.episodes_per_s / alone.episodes_per_s for alone, there in zip(passes[False], passes[True], strict=True)
    )
    rows.append(["with / without", "ratio of pairs", *ratio[:3]])
    print(report.table(["", "", "median", "low", "high"], rows))
    detail = {**vars(arguments), "out": None, "passes": {str(key): value for key, value in passes.items()}}
    report.save("hosts_collectors", {**figures, "standby_ratio": ratio.median}, detail=detail, out=arguments.out)


async def measure(arguments: argparse.Namespace) -> dict[bool, list[Pass]]:
    passes: dict[bool, list[Pass]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        async with PrivateNode(Path(folder) / "broker") as node:
            for pair in range(arguments.pairs):
                for standby in (True, False) if pair % 2 else (False, True):
                    run = f"pass-{pair}-{int(standby)}"
                    passes[standby].append(await collect(Path(folder), run, node.amqp_url, arguments, standby=standby))
                    print(run, passes[standby][-1], flush=True)
    return passes


async def collect(folder: Path, run: str, url: str, arguments: argparse.Namespace, *, standby: bool) -> Pass:
    """Send all messages through a collector's process, followed by another one if `standby`."""
    leading, following = (make_job(folder / name, run, url, standby=standby) for name in ("leader", "standby"))
    inbox = topology.inbox(run)
    async with AmqpBroker.open(url, name="benchmark") as broker, contextlib.AsyncExitStack() as stack:
        await broker.declare(run, policies=["main"], kinds=["math"])
        leader = await stack.enter_async_context(collector(leading))
        while not (await broker.depths([inbox]))[inbox].consumers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if standby:
            await stack.enter_async_context(collector(following))
            while not count_issued(following):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with feeding(leading, url, arguments) as published:
            done = await take_rollouts(broker, run, published, leader.pid)
        while standby and count_trained(following) < published:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    return done


@contextlib.asynccontextmanager
async def feeding(job: SwarmJob, url: str, arguments: argparse.Namespace) -> AsyncIterator[int]:
    """Publish messages while the context is open, and wait for the last ones at its end. Provide the number of episodes."""
    share, turn_queues = arguments.episodes // arguments.feeders, job.collector.turn_queues
    if share % GROUP_SIZE:
        raise ValueError(
            f"{share} episodes of a feeder are not a multiple of the group size, {GROUP_SIZE}: change --episodes"
        )
    sizes = (share, arguments.turns, arguments.tokens // 2)
    feeders = [
        SPAWN.Process(target=feed, args=(url, job.run, feeder, turn_queues, *sizes))
        for feeder in range(arguments.feeders)
    ]
    for feeder in feeders:
        feeder.start()
    yield share * arguments.feeders
    for feeder in feeders:
        await asyncio.to_thread(feeder.join)


async def take_rollouts(broker: AmqpBroker, run: str, num: int, pid: int) -> Pass:
    """Take and report rollouts as a learner does; measure from the first group to the last."""
    taken, began_at, began_cpu = 0, 0.0, 0.0
    async with broker.consume(topology.ready(run, "main"), prefetch=4 * BATCH) as deliveries:
        while taken < num:
            batch = [await anext(deliveries) for _ in range(min(BATCH, num - taken))]
            if not taken:
                began_at, began_cpu = time.perf_counter(), report.processor_s(pid)
            taken += len(batch)
            names = tuple(one.message.episode_id for one in batch if isinstance(one.message, Rollout))
            version = taken // BATCH
            await broker.publish(
                topology.inbox(run),
                StepReport(run=run, policy="main", record=version, version=version, trained=names),
            )
            await deliveries.ack_through(batch[-1])
    wall_s, cpu_s = time.perf_counter() - began_at, report.processor_s(pid) - began_cpu
    return Pass((num - BATCH) / wall_s, (num - BATCH) / cpu_s)


def feed(url: str, run: str, feeder: int, turn_queues: int, episodes: int, turns: int, tokens: int) -> None:
    """Publish the messages of some episodes, as a process of its own. Turns are divided as proxies divide them."""

    async def publish() -> None:
        async with AmqpBroker.open(url, name="feeder") as broker:
            messages = iter(traffic(episodes, turns, tokens))
            while window := list(islice(messages, WINDOW)):
                async with asyncio.TaskGroup() as tasks:
                    for message in window:
                        queue = topology.inbox(run)
                        if isinstance(message, Turn):
                            queue = topology.turns_of(run, message.episode_id, turn_queues)
                        tasks.create_task(broker.publish(queue, of_run(message, run, feeder)))

    asyncio.run(publish())


def of_run(message: Message, run: str, feeder: int) -> Message:
    if isinstance(message, EpisodeBegin):
        slot = msgspec.structs.replace(message.slot, task_id=f"{feeder}.{message.slot.task_id}")
        return msgspec.structs.replace(message, run=run, slot=slot)
    return msgspec.structs.replace(message, run=run)


def count_issued(job: SwarmJob) -> int:
    return count(job, "SELECT count(*) FROM tickets")


def count_trained(job: SwarmJob) -> int:
    return count(job, "SELECT count(*) FROM episodes WHERE state = 'trained'")


def count(job: SwarmJob, statement: str) -> int:
    try:
        with contextlib.closing(sqlite3.connect(f"file:{job.run_folder.inbox}?mode=ro", uri=True)) as store:
            return int(store.execute(statement).fetchone()[0])
    except sqlite3.OperationalError:  # not there yet
        return 0


def make_job(folder: Path, run: str, url: str, *, standby: bool = False, processes: int = 1) -> SwarmJob:
    job = SwarmJob.build(
        {
            "run": run,
            "folder": str(folder),
            "mix": {"math": 1.0},
            "policies": {"main": {"model": "m"}},
            "broker": {"url": url},
            "groups": {"group_size": GROUP_SIZE},
            "collector": {"standby": standby, "processes": processes},
            "transcripts": {"size_gb": 0.0},
        }
    )
    folder.mkdir(exist_ok=True)
    (folder / f"{run}.toml").write_text(job.to_toml())
    return job


@contextlib.asynccontextmanager
async def collector(job: SwarmJob) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = [sys.executable, "-m", "swarmq", "collector", f"{job.folder}/{job.run}.toml"]
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL, preexec_fn=die_with_parent)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    main()
