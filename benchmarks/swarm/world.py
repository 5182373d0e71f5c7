"""A run with everything but a model: real broker, proxy, collector, batch log and workers, each a process of its own.

    python -m benchmarks.swarm.world KIND PACE CONCURRENCY     one of its workers, invited by $SWARMQ_INVITE

The engine answers random letters at once and the trainer trains nothing, so what is measured is the swarm. Rewards are
random, because no verifier pays for random letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from swarmq import AsyncEpisode, AsyncSwarmClient, keys
from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s
from swarmq.broker.node.process import PrivateNode
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker_processes import run_workers
from swarmq.config import SwarmJob
from swarmq.observe.board import Board
from swarmq.observe.monitor import Follower, follow
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.processes import die_with_parent, find_free_port, stop_group

RUN, POLICY = "swarm", "main"
CALL_S = 120.0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How the agents of one worker behave."""

    seconds: float = 0.0
    """Mean time of an environment, exponentially distributed."""
    fails: float = 0.0
    """Share of the attempts that raise."""
    bonus: float = 0.0
    """Added to the reward: what an edit of the reward function changes."""
    code_version: str = "swarm"


class World:
    """What runs, and how to add workers to it."""

    def __init__(self, folder: Path, job: SwarmJob, broker: AmqpBroker, follower: Follower) -> None:
        self.folder, self.job, self.broker, self.follower = folder, job, broker, follower
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._stack = contextlib.AsyncExitStack()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, folder: Path, *, run: str = RUN, amqp_url: str | None = None, lanes: int = 1, **settings: Any
    ) -> AsyncIterator[World]:
        """`settings` are those of the job, besides its addresses; without `amqp_url` it has a RabbitMQ of its own.

        It has as many proxies, and as many engines, as `lanes`.
        """
        async with contextlib.AsyncExitStack() as stack:
            node = None if amqp_url else await stack.enter_async_context(PrivateNode(folder / "broker"))
            url = amqp_url or (node.amqp_url if node else "")
            engines, ports = [[find_free_port() for _ in range(lanes)] for _ in range(2)]
            tree = {
                "run": run,
                "folder": str(folder / "runs"),
                "broker": {"url": url},
                "proxy": {"port": ports[0], "count": lanes},
                "policies": {
                    POLICY: {
                        "model": "none",
                        "sampling": {"max_tokens": 8},
                        "engine": {"urls": [f"http://127.0.0.1:{port}" for port in engines]},
                    }
                },
            }
            job = SwarmJob.build(tree | settings)
            job.run_folder.path.mkdir(parents=True, exist_ok=True)
            resolved = job.run_folder.resolved
            resolved.write_text(job.to_toml())
            ProxyRegistry(job.run_folder.proxies).write(map(job.proxy.url, ports))
            broker = await stack.enter_async_context(
                AmqpBroker.open(url, name="swarm", deadline_s=initial_connect_timeout_s())
            )
            await broker.declare(run, policies=[POLICY], kinds=job.task_kinds)
            follower = await stack.enter_async_context(follow(job, broker, record=job.run_folder.events))
            world = cls(folder, job, broker, follower)
            await stack.enter_async_context(world._stack)
            path = str(resolved)
            for number, (engine, port) in enumerate(zip(engines, ports, strict=True)):
                await world.start_engine(f"engine.{number}", engine)
                arguments = ["--port", str(port), "--number", str(number)]
                await world.start(f"proxy.{number}", ["swarmq", "proxy", path, *arguments])
            await world.start("collector", ["swarmq", "collector", path])
            await world.start("trainer", ["benchmarks.soak", "--part", "trainer", path])
            if node:
                world.node = node
            names = {f"proxy.{number}" for number in range(lanes)}
            await world.until(lambda board: names <= board.processes.keys())
            yield world

    node: PrivateNode

    async def start_engine(self, name: str, port: int) -> None:
        await self.start(name, ["benchmarks.faults.engine", str(port), os.devnull, "--quick"])

    async def start(self, name: str, arguments: list[str], **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *arguments),
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=die_with_parent,
            )
        self.processes[name] = process
        self._stack.push_async_callback(stop_group, process, grace_s=5.0)

    async def hire(self, name: str, kind: str, pace: Pace, *, concurrency: int, client: str = "") -> None:
        """A worker, as a process of its own; `client` is whose invite it has, its own by default."""
        body = msgspec.json.encode(pace).decode()
        arguments = ["benchmarks.swarm.world", kind, body, str(concurrency)]
        spool = str(self.folder / "spool")
        await self.start(name, arguments, SWARMQ_INVITE=self.invite(client or name).encode(), SWARMQ_SPOOL=spool)

    async def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    def invite(self, name: str) -> keys.Invite:
        root, job = keys.load_root(self.job.run_folder.root_secret), self.job
        assert job.broker.url
        return keys.Invite(
            run=job.run,
            client=name,
            secret=keys.derive_client_secret(root, name),
            amqp_url=job.broker.url,
            base_url=job.proxy.url(job.proxy.port),
            base_urls=ProxyRegistry(job.run_folder.proxies).urls(),
            policies=(POLICY,),
            kinds=job.task_kinds,
            group_size=job.groups.group_size,
        )

    async def until(self, true_of: Callable[[Board], bool], *, seconds: float = 900.0) -> None:
        """Return when the board is so. Raises TimeoutError, with the ends of the parts that have died."""
        try:
            async with asyncio.timeout(seconds):
                await self.follower.until(true_of)
        except TimeoutError:
            dead = {name: process.returncode for name, process in self.processes.items() if process.returncode}
            raise TimeoutError(
                f"nothing came of it in {seconds:.0f} s; dead: {dead}; look into {self.folder}"
            ) from None

    @property
    def step(self) -> int:
        steps = self.follower.board.steps.get(POLICY)
        return int(steps[-1]["version"]) if steps else 0

    async def reach(self, step: int) -> None:
        await self.until(lambda _: self.step >= step)


class Agent:
    """One model call, an environment that takes its time and fails now and then, a random reward."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, ep: AsyncEpisode) -> float:
        await self.ask(ep)
        return await self.act()

    async def ask(self, ep: AsyncEpisode) -> None:
        """Make the model call."""
        if self._http is None:
            limits = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S), connector=limits)
        body = {"model": ep.model, "messages": [{"role": "user", "content": ep.task.id}], "max_tokens": 8}
        headers = {"authorization": f"Bearer {ep.api_key}"}
        async with self._http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers) as response:
            answer = msgspec.json.decode(await response.read())
        if "choices" not in answer:
            raise RuntimeError(str(answer))

    async def act(self) -> float:
        """Take the environment's time, and return the reward."""
        if self._pace.seconds:
            await asyncio.sleep(random.expovariate(1 / self._pace.seconds))
        if random.random() < self._pace.fails:
            raise RuntimeError("the environment broke")
        return random.random() + self._pace.bonus


def main() -> None:
    kind, pace, concurrency = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Pace), int(sys.argv[3])
    client = AsyncSwarmClient(code_version=pace.code_version)
    plan = RunnerOptions(concurrency=concurrency, max_attempts=1000, progress=False)
    run_workers(client, {kind: Agent(pace).__call__}, plan)


if __name__ == "__main__":
    main()
