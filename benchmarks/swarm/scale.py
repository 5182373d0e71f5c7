"""1, 4 and 16 worker processes with room for 2,000 episodes: episodes a second, and what an episode costs whom.

How many episodes are open is their rate times the second that each takes; `hold` makes them last, so that all 2,000 are.
All of it runs on one machine, workers included. With as few cores as this benchmark is usually run on, more workers
cannot be faster: they share the same processors with the broker, the proxy and the collector. The efficiency is
therefore the rate with 16 workers over the rate with one, with the same episodes at once: 1 means that splitting the
work among 16 processes costs nothing. On 17 or more cores the same figure may be as high as 16.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.swarm.world import RUN, Pace, World
from swarmq import SwarmTask
from swarmq.client.data.feed import feed

WORKERS = (1, 4, 16)
AT_ONCE = 2000
GROUP_SIZE, GROUPS = 8, 32
STALENESS, HELD_STALENESS = 8, 32
"""Where episodes last, many more groups wait for their last members, and the window of tickets holds those, too."""
HELD_S = 30.0
"""Of an episode, where all are to be open."""
LANES = 4
"""Proxies, and engines."""


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    episodes_per_s: float
    cpu_ms: dict[str, float]
    """Part -> processor milliseconds an episode, of all its processes together."""
    open_max: int
    """Episodes at once that the collector saw."""
    dropped: int = 0
    """Episodes that were not trained, for any reason."""


def run(episodes: int) -> list[Scaled]:
    found = []
    for workers in WORKERS:
        with tempfile.TemporaryDirectory(prefix="swarmq-scale-") as folder:
            found.append(asyncio.run(_run(Path(folder), workers, episodes, seconds=1.0, staleness=STALENESS)))
        print(f"{workers} workers: {found[-1].episodes_per_s:.1f} episodes/s", flush=True)
    return found


def hold(episodes: int) -> Scaled:
    with tempfile.TemporaryDirectory(prefix="swarmq-hold-") as folder:
        return asyncio.run(_run(Path(folder), WORKERS[-1], episodes, seconds=HELD_S, staleness=HELD_STALENESS))


async def _run(folder: Path, workers: int, episodes: int, *, seconds: float, staleness: int) -> Scaled:
    """From a fifth of the episodes to the last one, each of which takes `seconds` besides its calls."""
    groups = {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS, "max_staleness": staleness}
    window = GROUP_SIZE * GROUPS * (staleness + 1)
    async with World.open(folder, lanes=LANES, mix={"default": 1.0}, groups=groups) as world:
        tasks = [SwarmTask(f"t{number}", "default", None) for number in range((episodes + window) // GROUP_SIZE + 1)]
        await feed(world.broker, RUN, tasks, "default", repeats=GROUP_SIZE, progress_file=folder / "fed.json")
        for number in range(workers):
            await world.hire(f"worker.{number}", "default", Pace(seconds=seconds), concurrency=AT_ONCE // workers)

        def finished() -> int:
            return int(world.follower.board.reported("collector").get("finished", 0))

        def spent() -> dict[str, float]:
            pids = {name: process.pid for name, process in world.processes.items()} | {"broker": world.node.pids[0]}
            return {name: report.processor_s(pid) for name, pid in pids.items()}

        await world.until(lambda _: finished() >= episodes // 5)
        began, first, before = time.monotonic(), finished(), spent()
        most = 0
        while finished() < episodes:
            seen = finished()
            await world.until(lambda _, seen=seen: finished() > seen)
            most = max(most, int(world.follower.board.reported("collector").get("open", 0)))
        took, count, after = time.monotonic() - began, finished() - first, spent()
        dropped = sum(world.follower.board.reported("collector").get("dropped", {}).values())
    cost: defaultdict[str, float] = defaultdict(float)
    for name in after:
        cost[name.partition(".")[0]] += 1e3 * (after[name] - before[name]) / count
    return Scaled(workers=workers, episodes_per_s=count / took, cpu_ms=dict(cost), open_max=most, dropped=dropped)
