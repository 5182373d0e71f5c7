"""The course of a demo while the run is up: measure, train, kill a client, replace it, measure again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from swarmq import EvalReport, SwarmTask, keys
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV
from swarmq.client.data.feed import feed
from swarmq.demo.client import LedgerEntry, Solver, read_ledger
from swarmq.demo.job import DemoSize
from swarmq.demo.problems import problems
from swarmq.errors import SwarmqError
from swarmq.observe.curves import Mark
from swarmq.runtime.processes import die_with_parent, stop_group
from swarmq.runtime.wording import count_of
from swarmq.whole_run.session import Session

CLIENT_DRAIN_S = 30.0
SEED_STRIDE = 1_000_000
"""Distance between the first problems of two seeds, so that no two seeds share a training problem."""


class ClientProcess:
    """A client of the demo in a process of its own."""

    def __init__(self, name: str, reward: str, folder: Path) -> None:
        self.name = name
        self.reward = reward
        self.ledger = folder / f"ledger-{name}.jsonl"
        self._log = folder / "logs" / f"client-{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, invite: str, concurrency: int) -> None:
        with self._log.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "swarmq.demo.client", "--reward", self.reward),
                *("--ledger", str(self.ledger), "--concurrency", str(concurrency)),
                env=os.environ | {"SWARMQ_INVITE": invite, BROKER_ANSWERED_ENV: "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )

    async def kill(self) -> None:
        """Send SIGKILL, so that the client can neither report nor finish anything."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None:
            await stop_group(self._process, grace_s=CLIENT_DRAIN_S)


class Scenario:
    """The demo's scenario. `held_out` maps weight versions to evaluation reports."""

    def __init__(
        self,
        session: Session,
        size: DemoSize,
        say: Callable[[str], None],
    ) -> None:
        self._deployment, self._broker, self._follower, self._client = session
        self._size = size
        self._say = say
        self._solver = Solver(session.client.invite.base_url)
        self.clients: list[ClientProcess] = []
        self.held_out: dict[int, EvalReport] = {}
        self.marks: list[Mark] = []
        self.train_seconds = 0.0

    @property
    def version(self) -> int:
        """Weight version after the newest step."""
        steps = self._follower.board.steps.get("main")
        return int(steps[-1]["version"]) if steps else 0

    @property
    def entries(self) -> list[LedgerEntry]:
        """Entries of all clients' ledgers."""
        return [entry for client in self.clients for entry in read_ledger(client.ledger)]

    async def run(self) -> None:
        """Run from the first measurement to the last."""
        await self._feed()
        await self._measure()
        began = time.monotonic()
        try:
            first = await self._start_client("a", "honest")
            await self._start_client("b", "honest")
            await self._wait_for_step(self._size.steps // 2)
            self._say("killing client a with SIGKILL")
            await first.kill()
            self.marks.append(Mark(at=time.time(), text="client a killed; c joins with another reward"))
            await self._start_client("c", "concise")
            await self._wait_for_step(self._size.steps)
            await self._deployment.learners_done.wait()
        finally:
            self.train_seconds = time.monotonic() - began
            self._say("last step done; clients finish their open episodes")
            async with asyncio.TaskGroup() as tasks:
                for client in self.clients:
                    tasks.create_task(client.stop())
        await self._measure()
        self._say("the collector processes the remaining messages")
        inbox = topology.inbox(self._deployment.job.run)
        await self._follower.until(lambda board: board.depths.get(inbox) == 0)

    async def _feed(self) -> None:
        job = self._deployment.job
        groups = self._size.steps * job.groups.groups_per_batch * self._size.spare_groups
        first = job.policies["main"].train.seed * SEED_STRIDE
        for kind, share in job.mix.items():
            tasks = [
                SwarmTask(problem.task_id, kind, msgspec.to_builtins(problem))
                for problem in problems(kind, "train", int(groups * share) + job.groups.groups_per_batch, start=first)
            ]
            self._say(f"feeding {count_of(len(tasks), 'task')} of kind {kind}")
            await feed(
                self._broker,
                job.run,
                tasks,
                kind,
                repeats=job.groups.group_size,
                progress_file=job.run_folder.path / f"fed-{kind}.json",
                secret=keys.derive_task_secret(keys.load_root(job.run_folder.root_secret)),
            )

    async def _measure(self) -> None:
        """Measure the held-out reward by the honest score, sampled as in training."""
        version = self.version
        self._say(f"measuring the held-out reward of version {version}")
        kinds = list(self._deployment.job.mix)
        per_kind = self._size.held_out // len(kinds)
        tasks = [
            SwarmTask(problem.task_id, problem.kind, msgspec.to_builtins(problem))
            for problem in itertools.chain(*(problems(kind, "held-out", per_kind) for kind in kinds))
        ]
        report = await self._client.evaluate(
            tasks,
            lambda ep: self._solver(ep).reward,
            repeats=1,
            concurrency=self._size.concurrency,
            progress=False,
        )
        self.held_out[version] = report
        self._say(f"held-out reward of version {version}: {report}")

    async def _start_client(self, name: str, reward: str) -> ClientProcess:
        self._say(f"client {name} joins with the {reward} reward")
        client = ClientProcess(name, reward, self._deployment.job.run_folder.path)
        self.clients.append(client)
        await client.start(self._client.invite.encode(), self._size.concurrency // 2)
        return client

    async def _wait_for_step(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._size.patience_s):
                await self._follower.until(lambda _board: self.version >= version)
        except TimeoutError:
            raise SwarmqError(
                f"step {version} was not reached within {self._size.patience_s:.0f} s (newest step: {self.version}): "
                f"see the logs in {self._deployment.job.run_folder.logs}"
            ) from None
