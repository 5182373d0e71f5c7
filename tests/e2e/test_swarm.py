"""A swarm of real processes, with random letters for a model, that is changed while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.swarm.world import POLICY, Pace, World

from swarmq import SwarmTask
from swarmq.broker.client_rules import NAME_SEPARATOR
from swarmq.client.data.feed import feed
from swarmq.learner.store.batch_log import read_records
from swarmq.observe.board import ProcessState
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.processes import find_free_port
from swarmq.weights.push.engine_control import EngineControl

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1200)]

GROUPS = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 2}


async def fed(world: World, folder: Path, tasks: int) -> None:
    named = [SwarmTask(f"t{number}", "default", None) for number in range(tasks)]
    await feed(world.broker, world.job.run, named, "default", repeats=2, progress_file=folder / "fed.json")


async def swarmq(*arguments: str) -> str:
    def ask() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "swarmq", *arguments], capture_output=True, text=True, check=False)

    done = await asyncio.to_thread(ask)
    assert done.returncode == 0, done.stderr
    return done.stdout


def calls(process: ProcessState) -> int:
    return int(process.fields.get("calls", 0))


def trained(world: World) -> tuple[list[int], Counter[str], set[str]]:
    """Steps of the batch log, how often each episode was trained, and the clients they came from."""
    log = [record for record in read_records(world.job.run_folder.batch_log(POLICY)) if record.episodes]
    times = Counter(episode for record in log for episode in record.index.trained)
    return (
        [r.index.version for r in log],
        times,
        {e.client_id.partition(NAME_SEPARATOR)[0] for r in log for e in r.episodes},
    )


async def test_engines_proxies_and_workers_come_and_go_while_a_run_trains(tmp_path, amqp_url, run_name):
    async with World.open(tmp_path, run=run_name, amqp_url=amqp_url, mix={"default": 1.0}, groups=GROUPS) as world:
        run, proxies = str(world.job.run_folder.path), ProxyRegistry(world.job.run_folder.proxies)
        await fed(world, tmp_path, 4000)
        await world.hire("first", "default", Pace(seconds=0.05), concurrency=4)
        await world.reach(2)

        [old] = world.job.policies[POLICY].engine.urls
        new = f"http://127.0.0.1:{find_free_port()}"
        await world.start_engine("engine.new", int(new.rpartition(":")[2]))
        async with EngineControl(new) as engine:
            while not await engine.is_healthy():  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.05)
        assert f"{new} serves {POLICY}" in await swarmq("engine", "add", run, new)
        await swarmq("engine", "remove", run, old)
        listed = await swarmq("engine", "list", run)
        assert new in listed
        assert old not in listed
        await world.kill("engine.0")
        await world.reach(world.step + 2)

        await world.start("proxy.joined", ["swarmq", "proxy", f"{run}/resolved.toml", "--join"])
        await world.until(
            lambda board: any(calls(process) for source, process in board.processes.items() if source != "proxy.0")
        )
        await world.hire("second", "default", Pace(seconds=0.05), concurrency=4)
        await world.until(lambda _: "second" in trained(world)[2])
        first, leaving = world.processes["first"], world.processes["proxy.joined"]
        first.terminate()
        assert await first.wait() == 0, "it finishes what it has begun"
        leaving.terminate()
        while len(proxies.urls()) > 1:  # noqa: ASYNC110 - another process changes the file
            await asyncio.sleep(0.05)
        assert leaving.returncode is None, "those who have begun there are served"
        await world.reach(world.step + 2)
        with contextlib.suppress(ProcessLookupError):  # it has left by itself if that has taken long
            leaving.terminate()
        assert await leaving.wait() == 0
        await world.reach(world.step + 2)
        steps, times, clients = trained(world)
        assert steps == list(range(1, len(steps) + 1))
        assert set(times.values()) == {1}
        assert clients == {"first", "second"}
