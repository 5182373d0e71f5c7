"""What a collector of one, two and four processes carries: finished episodes per second, and processor time of each process.

The messages of many episodes wait in the queues (turns divided as proxies divide them); the collector commits them and publishes
rollouts, and this process takes and reports these. Time counts from the first consumer to the last rollout. It is the speed only if
each process has a core of its own, RabbitMQ and this one included. Processor time tells more elsewhere: `carried` is the number of
episodes per second at which the busiest process of the collector would use a whole core. Example:

    python -m benchmarks.hosts.processes --episodes 1600 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from benchmarks.hosts.collectors import collector, feeding, make_job, take_rollouts
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.runtime.processes import find_children

PROCESSES = (1, 2, 4)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=1600)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a turn, half of them sampled")
    parser.add_argument("--feeders", type=int, default=4, help="processes that publish, before the collector starts")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each number of processes, in turns")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further round after this time")
    arguments = parser.parse_args()
    passes = asyncio.run(measure(arguments))
    rows, figures = [], {}
    for num, done in passes.items():
        speed = report.Spread.of(one.episodes_per_s for one in done)
        carried = report.Spread.of(1000 / max(one.cpu_ms) for one in done)
        total = report.Spread.of(sum(one.cpu_ms) for one in done)
        first = report.Spread.of(one.cpu_ms[0] for one in done)
        rows += [
            [num, "episodes per s", *speed[:3]],
            [num, "carried, episodes per s", *carried[:3]],
            [num, "ms of a core for an episode, all processes", *total[:3]],
            [num, "ms of a core for an episode, first process", *first[:3]],
        ]
        figures[f"collector_episodes_per_s_{num}"] = speed.median
        figures[f"collector_carried_{num}"] = carried.median
        figures[f"collector_ms_{num}"] = total.median
        figures[f"collector_first_ms_{num}"] = first.median
    print(report.table(["processes", "", "median", "low", "high"], rows))
    detail = {**vars(arguments), "out": None, "minutes": None, "load": os.getloadavg(), "passes": passes}
    report.save("hosts_processes", figures, detail=detail, out=arguments.out)


class Drained(NamedTuple):
    episodes_per_s: float
    cpu_ms: tuple[float, ...]
    """Processor time for an episode of each process."""


async def measure(arguments: argparse.Namespace) -> dict[int, list[Drained]]:
    passes: dict[int, list[Drained]] = {num: [] for num in PROCESSES}
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        async with PrivateNode(Path(folder) / "broker") as node:
            for number in takewhile(lambda number: not number or time.monotonic() < until, range(arguments.rounds)):
                for num in PROCESSES if number % 2 == 0 else reversed(PROCESSES):
                    run = f"pass-{number}-{num}"
                    passes[num].append(await drain(Path(folder), run, node.amqp_url, arguments, num))
                    print(run, passes[num][-1], flush=True)
    return passes


async def drain(folder: Path, run: str, url: str, arguments: argparse.Namespace, processes: int) -> Drained:
    """Fill the queues, and let a collector empty them."""
    job = make_job(folder / run, run, url, processes=processes)
    async with AmqpBroker.open(url, name="benchmark") as broker:
        await broker.declare(run, policies=["main"], kinds=["math"], turn_queues=job.collector.turn_queues)
        async with feeding(job, url, arguments) as published:
            pass
        async with collector(job) as first:
            while not (await broker.depths([topology.inbox(run)]))[topology.inbox(run)].consumers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pids = [first.pid, *sorted(find_children(first.pid, sys.executable))]
            assert len(pids) == processes
            began_at, began_cpu = time.perf_counter(), [*map(report.processor_s, pids)]
            await take_rollouts(broker, run, published, first.pid)
            wall_s, ended_cpu = time.perf_counter() - began_at, [*map(report.processor_s, pids)]
    spent_s = (ended - began for began, ended in zip(began_cpu, ended_cpu, strict=True))
    return Drained(published / wall_s, tuple(1000 * spent / published for spent in spent_s))


if __name__ == "__main__":
    main()
