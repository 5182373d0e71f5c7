"""What recording transcripts costs the calls of agents: two whole runs on one machine, one with transcripts and one without, asked in
turns through their proxies. A proxy knows nothing of transcripts; its collector writes them, on the same cores. Once agents pause
between calls, and once they call as fast as the machine can, so that everything competes for its cores.

    python -m benchmarks.dashboard.call_latency --pairs 9
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks import report
from benchmarks.swarm.world import Agent, Pace, World
from swarmq import AsyncEpisode, AsyncSwarmClient
from swarmq.broker.node.process import PrivateNode

CALLS, CONCURRENCY = 512, 16
"""Episodes of one round, each with one call, and how many are attempted at once."""
WITH, WITHOUT = "recorded", "bare"
PAUSE_S = {"paced": 0.2, "saturated": 0.0}
"""Mean seconds between an agent's calls."""


class Clock(Agent):
    """An agent that notes how long its calls took."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(Pace(seconds=pause_s))
        self.seconds: list[float] = []

    async def aclose(self) -> None:
        if self._http:
            await self._http.close()

    async def __call__(self, ep: AsyncEpisode) -> float:
        began = time.perf_counter()
        await self.ask(ep)
        self.seconds.append(time.perf_counter() - began)
        return await self.act()


class Caller:
    """A client of one of the runs, and its agent."""

    def __init__(self, client: AsyncSwarmClient, pause_s: float) -> None:
        self._client, self._agent = client, Clock(pause_s)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: Path, amqp_url: str, *, size_gb: float, pause_s: float) -> AsyncIterator[Caller]:
        """Start a run in `folder` that keeps so many gigabytes of transcripts."""
        async with (
            World.open(folder, run=folder.name, amqp_url=amqp_url, transcripts={"size_gb": size_gb}) as world,
            AsyncSwarmClient(world.invite("clock")) as client,
        ):
            caller = cls(client, pause_s)
            async with contextlib.aclosing(caller._agent):
                yield caller

    async def measure(self, number: int) -> float:
        """Return the median seconds of a call in a round."""
        self._agent.seconds.clear()
        tasks = [{"id": f"{number}-{task}"} for task in range(CALLS // self._client.invite.group_size)]
        summary = await self._client.run_episodes_until_all_complete(tasks, self._agent, concurrency=CONCURRENCY)
        assert len(self._agent.seconds) >= CALLS, summary
        return statistics.median(self._agent.seconds)


async def compare_calls(folder: Path, pairs: int, pause_s: float) -> list[tuple[float, float]]:
    """Return, for each pair of rounds, the median seconds of a call with transcripts and without. `folder` has an empty folder for
    each of the two runs."""
    found = []
    async with (
        PrivateNode(folder / "broker") as node,
        Caller.open(folder / WITH, node.amqp_url, size_gb=2.0, pause_s=pause_s) as recorded,
        Caller.open(folder / WITHOUT, node.amqp_url, size_gb=0.0, pause_s=pause_s) as bare,
    ):
        for number in range(pairs + 1):  # the first warms both
            order = (recorded, bare) if number % 2 else (bare, recorded)
            taken = {caller: await caller.measure(number) for caller in order}
            found.append((taken[recorded], taken[bare]))
    return found[1:]


def _compare(pairs: int, pause_s: float) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory(prefix="swarmq-calls-") as scratch:
        folder = Path(scratch)
        for name in (WITH, WITHOUT):
            (folder / name).mkdir()
        found = asyncio.run(compare_calls(folder, pairs, pause_s))
        recorded = {name: len(list(folder.glob(f"{name}/runs/*/transcripts/*"))) for name in (WITH, WITHOUT)}
        assert recorded[WITH] and not recorded[WITHOUT], recorded  # noqa: PT018 - what is measured must be right
    return found


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    figures, detail = dict[str, float](), dict[str, list[tuple[float, float]]]()
    for load, pause_s in PAUSE_S.items():
        found = detail[load] = _compare(arguments.pairs, pause_s)
        for name, column in zip(("with", "without"), zip(*found, strict=True), strict=True):
            figures[f"{load}_call_ms_{name}"] = 1000 * statistics.median(column)
        figures[f"{load}_call_ratio"] = statistics.median(one / other for one, other in found)
    print(report.table(["figure", "value"], list(figures.items())))
    report.save("dashboard_calls", figures, detail={"calls": CALLS, "seconds": detail}, out=arguments.out)


if __name__ == "__main__":
    main()
