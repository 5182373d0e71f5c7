"""What a collector of one, two and four processes carries: finished episodes per second, and processor time of each process.

The messages of many episodes wait in the queues (turns divided as proxies divide them); the collector commits them and publishes
rollouts, and this process takes and reports these. Time counts from the first consumer to the last rollout. It is the speed only if
each process has a core of its own, RabbitMQ and this one included. Processor time tells more elsewhere: `carried` is the number of
episodes per second at which the busiest process of the collector would use a whole core. With `--before` another version empties
queues of its own at the same time, so whatever else the machine does slows both: their processor times can be compared even where
it is busy. Example:

    python -m benchmarks.hosts.processes --episodes 1600 --rounds 5 --before ../swarmq-0.1.0/src
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import swarmq
from benchmarks import report
from benchmarks.hosts.collectors import collector, feeding, make_job, take_rollouts
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.runtime.processes import die_with_parent, find_children

PROCESSES = (1, 2, 4)
FILLED = b"filled\n"
"""Line of a pass when the queues are filled."""
HERE = Path(__file__).parents[2]


class Drained(NamedTuple):
    episodes_per_s: float
    cpu_ms: tuple[float, ...]
    """Processor time for an episode of each process."""

    @property
    def carried(self) -> float:
        return 1000 / max(self.cpu_ms)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=1600)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a turn, half of them sampled")
    parser.add_argument("--feeders", type=int, default=4, help="processes that publish, before the collector starts")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each number of processes, in turns")
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further round after this time")
    parser.add_argument(
        "--before", type=lambda path: Path(path).resolve(), help="the `src` of a checkout to compare with"
    )
    parser.add_argument("--pass", nargs=2, dest="one", metavar=("RUN", "URL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run, url = arguments.one
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(drain(Path(folder), run, url, arguments, arguments.processes[0]))))
        return
    passes, before = asyncio.run(measure(arguments))
    rows, figures = [], {}
    for num, done in passes.items():
        speed = report.Spread.of(one.episodes_per_s for one in done)
        carried = report.Spread.of(one.carried for one in done)
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
        if arguments.before:
            pairs = zip(done, before[num], strict=True)
            ratio = report.Spread.of(now.carried / then.carried for now, then in pairs)
            rows.append([num, "carried, ratio to before", *ratio[:3]])
            figures[f"collector_carried_ratio_{num}"] = ratio.median
    print(report.table(["processes", "", "median", "low", "high"], rows))
    hidden = {"out": None, "minutes": None, "before": None, "one": None}
    detail = {**vars(arguments), **hidden, "load": os.getloadavg(), "passes": passes, "passes_before": before}
    report.save(
        "hosts_processes_before" if arguments.before else "hosts_processes", figures, detail=detail, out=arguments.out
    )


async def measure(arguments: argparse.Namespace) -> tuple[dict[int, list[Drained]], dict[int, list[Drained]]]:
    """Return the passes with each number of processes, of this version and of the one before."""
    versions = {"now": Path(swarmq.__file__).parents[1]} | ({"before": arguments.before} if arguments.before else {})
    passes: dict[str, dict[int, list[Drained]]] = {
        version: {num: [] for num in arguments.processes} for version in ("now", "before")
    }
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        async with PrivateNode(Path(folder) / "broker") as node:
            for number in takewhile(lambda number: not number or time.monotonic() < until, range(arguments.rounds)):
                order = dict(versions.items() if number % 2 == 0 else reversed(versions.items()))
                for num in arguments.processes:
                    done = await drain_together(order, f"pass-{number}-{num}", node.amqp_url, arguments, num)
                    for version, drained in done.items():
                        passes[version][num].append(drained)
                    print(number, num, done, flush=True)
    return passes["now"], passes["before"]


async def drain_together(
    versions: dict[str, Path], run: str, url: str, arguments: argparse.Namespace, processes: int
) -> dict[str, Drained]:
    """Make a pass with each version, whose `src` is given. All queues are filled before the first collector starts."""
    filled: dict[str, asyncio.subprocess.Process] = {}
    for version, source in versions.items():
        filled[version] = process = await start_pass(source, f"{run}-{version}", url, arguments, processes)
        assert process.stdout is not None
        if await process.stdout.readline() != FILLED:
            raise SystemExit(f"the pass {run}-{version} has failed: it did not fill its queues")
    outputs = await asyncio.gather(*(process.communicate(b"\n") for process in filled.values()))
    drained = {}
    for (version, process), (output, _) in zip(filled.items(), outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"the pass {run}-{version} has failed with status {process.returncode}")
        speed, cpu_ms = json.loads(output.splitlines()[-1])
        drained[version] = Drained(speed, tuple(cpu_ms))
    return drained


async def start_pass(
    source: Path, run: str, url: str, arguments: argparse.Namespace, processes: int
) -> asyncio.subprocess.Process:
    """Start a pass with the version whose `src` is given. It writes `FILLED`, and goes on when it reads a line."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("episodes", "turns", "tokens", "feeders")]
    python = [sys.executable, "-m", "benchmarks.hosts.processes"]
    return await asyncio.create_subprocess_exec(
        *(*python, *sizes, "--processes", str(processes), "--pass", run, url),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(HERE), os.environ.get("PYTHONPATH", "")])},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )


async def drain(folder: Path, run: str, url: str, arguments: argparse.Namespace, processes: int) -> Drained:
    """Fill the queues, and let a collector empty them."""
    job = make_job(folder / run, run, url, processes=processes)
    async with AmqpBroker.open(url, name="benchmark") as broker:
        await broker.declare(run, policies=["main"], kinds=["math"], turn_queues=job.collector.turn_queues)
        async with feeding(job, url, arguments) as published:
            pass
        sys.stdout.buffer.write(FILLED)
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
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
