"""A hundred thousand episodes through the real proxy, broker, collector and learner's I/O process: does anything grow?

    python -m benchmarks.soak --episodes 100000
    python -m benchmarks.soak --episodes 100000 --clients 6 --concurrency 24       where there are cores for them

The engine is scripted and takes no time, the trainer takes every batch and learns nothing; all else is the product.
Clients are processes whose agents make a call and end. Resident memory and open files of every process are read
as it goes: growth is what the last tenth of the episodes shows over the second one, medians of each. SIGTERM or SIGINT
end it early, and the episodes there were by then are what is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
import msgspec

from benchmarks.report import parser, save, table
from swarmq import AsyncEpisode, AsyncSwarmClient, keys
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.config import SwarmJob
from swarmq.messages import Slot
from swarmq.registries.engines import EngineRegistry
from swarmq.runtime import logs
from swarmq.runtime.processes import die_with_parent, find_free_port, stop_group

RUN, POLICY = "soak", "main"
GROUP_SIZE, GROUPS_PER_BATCH = 8, 8
POLL_S = 2.0
READ_S = 300.0
STALL_S = 600.0
"""Fewer episodes than a step's may be left when clients have no more tasks."""


class Seen(msgspec.Struct):
    """What a run shows."""

    samples: dict[str, list[tuple[int, float, int]]]
    """Process -> (episodes so far, resident MiB, open files), a few hundred times."""
    proxy: dict[str, Any]
    """Its last state event."""


async def play(folder: Path, *, episodes: int, clients: int, concurrency: int) -> Seen:
    """A run to its end."""
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(PrivateNode(folder / "broker"))
        job, engine_port = _job(folder, node.amqp_url), find_free_port()
        job = SwarmJob.build(_with_engine(job, engine_port))
        (folder / "job.toml").write_text(job.to_toml())
        broker = await stack.enter_async_context(AmqpBroker.open(node.amqp_url, name="soak"))
        await broker.declare(RUN, policies=[POLICY], kinds=job.mix)
        processes = {
            name: await stack.enter_async_context(_running(folder, name, arguments))
            for name, arguments in {
                "engine": ["-m", "benchmarks.faults.engine", str(engine_port), os.devnull, "--quick"],
                "proxy": ["-m", "swarmq", "proxy", str(folder / "job.toml")],
                "collector": ["-m", "swarmq", "collector", str(folder / "job.toml")],
                "trainer": ["-m", "benchmarks.soak", "--part", "trainer", str(folder / "job.toml")],
                **{
                    f"client{n}": [
                        *("-m", "benchmarks.soak", "--part", "client", str(folder / "job.toml")),
                        *(str(n), str(episodes // clients), str(concurrency)),
                    ]
                    for n in range(clients)
                },
            }.items()
        }
        return await _watch(broker, processes, episodes)


async def _watch(broker: AmqpBroker, processes: dict[str, asyncio.subprocess.Process], episodes: int) -> Seen:
    """Until all but a step's episodes are trained, or a signal."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    seen = Seen({name: [] for name in (*processes, "learner I/O")}, {})
    samples, looked, moved, trained = seen.samples, 0.0, time.monotonic(), 0
    async with broker.events(RUN) as events:
        while True:
            async with asyncio.timeout(STALL_S):
                event = await anext(event async for event in events if event.name == "state")
            if event.source == "proxy.0":
                seen.proxy = event.fields
            if event.source != "collector" or time.monotonic() - looked < POLL_S:
                continue
            looked = time.monotonic()
            if trained != (trained := event.fields["trained"]):
                moved = looked
            if looked - moved > STALL_S:
                raise SystemExit(f"nothing was trained for {STALL_S:g} s: {event.fields}")
            for name, process in processes.items():
                if process.returncode:
                    raise SystemExit(f"{name} has died with status {process.returncode}: see its log")
            pids = {name: process.pid for name, process in processes.items()}
            if child := _child(pids["trainer"]):
                pids["learner I/O"] = child
            for name, pid in pids.items():
                with contextlib.suppress(OSError, IndexError):
                    samples[name].append((trained, _resident_mib(pid), _open_files(pid)))
            print(f"{trained:>7} episodes trained, proxy {samples['proxy'][-1][1]:.0f} MiB", file=sys.stderr)
            if stop.is_set() or trained >= episodes - GROUP_SIZE * GROUPS_PER_BATCH:
                return seen


def growth(samples: list[tuple[int, float, int]]) -> tuple[float, float]:
    """Ratio of resident memory, and files more, of the last tenth of the episodes against the second."""
    episodes = samples[-1][0]
    early = [s for s in samples if episodes * 0.1 <= s[0] <= episodes * 0.2]
    late = [s for s in samples if s[0] >= episodes * 0.9]
    ratio = statistics.median(s[1] for s in late) / statistics.median(s[1] for s in early)
    return ratio, statistics.median(s[2] for s in late) - statistics.median(s[2] for s in early)


def trainer(job: SwarmJob) -> None:
    """The learner's loop without a model: every batch is trained at once, and every tenth is a checkpoint."""
    from swarmq.learner.feed.ipc import FeederLink, StopSignal  # noqa: PLC0415
    from swarmq.learner.store import records  # noqa: PLC0415  (the client needs none of it)

    version, stop = 0, StopSignal()

    def hello() -> records.Hello:
        return records.Hello(job=job, policy=POLICY, version=version, vocab_size=128)

    with stop.handle_signals(), FeederLink(hello, stop) as link:
        while batch := link.next(idle=lambda **_: None, idle_s=lambda: 60.0, evaluated=lambda _: None):
            version = records.decode_record(batch.record).index.version
            _label(job, version)
            link.send(records.StepDone(version=version, fields={"tokens_computed": 1}))
            if version % 10 == 0:
                link.send(records.CheckpointSaved(oldest=version))
        link.finish()


def _label(job: SwarmJob, version: int) -> None:
    """What is left of a weight push when there are no weights."""
    body = json.dumps({"new_version": str(version)}).encode()
    for url in EngineRegistry(job).urls()[POLICY]:
        asked = Request(f"{url}/update_weight_version", body, {"content-type": "application/json"})
        try:
            with urlopen(asked, timeout=READ_S):
                pass
        except OSError:
            if url in EngineRegistry(job).urls()[POLICY]:  # else it has left meanwhile
                raise


async def client(job: SwarmJob, number: int, episodes: int, concurrency: int) -> None:
    """Agents that make one call and end, one after another."""
    name = f"client{number}"
    root = keys.load_root(job.run_folder.root_secret)
    assert job.broker.url
    invite = keys.Invite(
        run=RUN,
        client=name,
        secret=keys.derive_client_secret(root, name),
        amqp_url=job.broker.url,
        base_url=f"http://127.0.0.1:{job.proxy.port}/v1",
        policies=(POLICY,),
        kinds=tuple(job.mix),
        group_size=GROUP_SIZE,
    )
    await _until_serving(job.proxy.port)
    slots = (Slot(task_id=f"{name}-{n // GROUP_SIZE}", repeat=n % GROUP_SIZE) for n in range(episodes))
    async with (
        AsyncSwarmClient(invite, spool=job.run_folder.path / "spool", code_version="soak") as swarm,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_S)) as http,
        asyncio.TaskGroup() as agents,
    ):

        async def agent() -> None:
            for slot in slots:
                ep = await swarm.begin_episode({"id": slot.task_id}, slot=slot)
                await _call(http, ep)
                await ep.end(random.random())

        for _ in range(concurrency):
            agents.create_task(agent())


async def _until_serving(port: int) -> None:
    async with asyncio.timeout(READ_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.2)


async def _call(http: aiohttp.ClientSession, ep: AsyncEpisode) -> None:
    body = {"model": ep.model, "messages": [{"role": "user", "content": ep.task.id}], "max_tokens": 8}
    headers = {"authorization": f"Bearer {ep.api_key}"}
    async with http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers) as response:
        answer: dict[str, Any] = json.loads(await response.read())
        assert answer["choices"], answer


@contextlib.asynccontextmanager
async def _running(folder: Path, name: str, arguments: list[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    with (folder / f"{name}.log").open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, preexec_fn=die_with_parent
        )
    try:
        yield process
    finally:
        await stop_group(process, grace_s=10.0)


def _job(folder: Path, amqp: str) -> dict[str, Any]:
    return {
        "run": RUN,
        "folder": str(folder / "runs"),
        "broker": {"url": amqp},
        "proxy": {"port": find_free_port()},
        "groups": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH, "max_staleness": 8},
        "policies": {POLICY: {"model": "none", "sampling": {"max_tokens": 8}, "train": {"keep_batches": False}}},
    }


def _with_engine(tree: dict[str, Any], port: int) -> dict[str, Any]:
    tree["policies"][POLICY]["engine"] = {"urls": [f"http://127.0.0.1:{port}"]}
    return tree


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--episodes", type=int, default=100_000)
    options.add_argument("--concurrency", type=int, default=24, help="agents of each client")
    options.add_argument("--clients", type=int, default=2)
    options.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.part:
        role, job = given.part[0], SwarmJob.load(given.part[1])
        logs.configure(role=role, run=RUN)
        trainer(job) if role == "trainer" else asyncio.run(client(job, *map(int, given.part[2:])))
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swarmq-soak-") as folder:
        how = {"episodes": given.episodes, "clients": given.clients, "concurrency": given.concurrency}
        seen = asyncio.run(play(Path(folder), **how))
    samples = seen.samples
    grown = {name: growth(found) for name, found in samples.items()}
    rows = [
        (name, round(found[-1][1]), round(grown[name][0], 3), found[-1][2], round(grown[name][1]))
        for name, found in samples.items()
    ]
    print(table(("process", "MiB at the end", "growth", "files at the end", "more"), rows))
    figures = {
        "episodes": samples["proxy"][-1][0],
        "rss_growth_ratio_proxy": grown["proxy"][0],
        "rss_growth_ratio_learner": grown["learner I/O"][0],
        "rss_growth_ratio_collector": grown["collector"][0],
        "rss_growth_ratio_client": max(grown[f"client{n}"][0] for n in range(given.clients)),
        "fd_growth": max(more for _, more in grown.values()),
    }
    thin = {name: found[:: max(1, len(found) // 50)] for name, found in samples.items()}
    detail = {"seconds": time.monotonic() - began, "proxy": seen.proxy, "samples": thin}
    save("soak", figures, detail=detail, out=given.out)


if __name__ == "__main__":
    main()
