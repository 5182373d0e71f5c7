"""A run on the real broker, without its daemons: the test plays the collector."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmq.broker import Depth, topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.keys import Invite
from swarmq.messages import EpisodeBegin, EpisodeEnd, Message, Slot, Task, Ticket


class Run:
    """Queues of a run, tickets on demand, and a reader of `in`."""

    def __init__(self, broker: AmqpBroker, invite: Invite, folder: Path) -> None:
        self.broker = broker
        self.invite = invite
        self.folder = folder
        self._issued = 0

    async def issue(self, count: int) -> None:
        for _ in range(count):
            self._issued += 1
            ticket = Ticket(run=self.invite.run, ticket_id=f"ticket-{self._issued}", kind="math")
            await self.broker.publish(topology.tickets(self.invite.run, "math"), ticket)

    async def feed(self, *names: str) -> None:
        for name in names:
            task = Task(run=self.invite.run, slot=Slot(task_id=name), kind="math", group_size=1)
            await self.broker.publish(topology.tasks(self.invite.run, "math"), task)

    async def pieces(self, enough: Callable[[list[Message]], bool]) -> list[Message]:
        """Takes what arrives in `in` until it is enough."""
        found: list[Message] = []
        async with self.broker.consume(topology.inbox(self.invite.run), prefetch=100) as deliveries:
            while not enough(found):
                delivery = await anext(deliveries)
                found.append(delivery.message)
                await delivery.ack()
        return found

    async def ends(self, count: int) -> list[EpisodeEnd]:
        found = await self.pieces(lambda got: sum(isinstance(one, EpisodeEnd) for one in got) >= count)
        return [piece for piece in found if isinstance(piece, EpisodeEnd)]

    async def begins(self, count: int) -> list[EpisodeBegin]:
        found = await self.pieces(lambda got: sum(isinstance(one, EpisodeBegin) for one in got) >= count)
        return [piece for piece in found if isinstance(piece, EpisodeBegin)]

    async def until(self, queue: str, depth: Depth) -> None:
        """Returns once that is what the queue has: the broker ends the sessions of who has gone in its own time."""
        async with asyncio.timeout(120):
            while (await self.broker.depths([queue]))[queue] != depth:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SWARMQ_INVITE": self.invite.encode(), "SWARMQ_SPOOL": str(self.folder / "spool")}

    @property
    def spooled(self) -> list[Path]:
        return list((self.folder / "spool").rglob("*.end"))


@contextlib.asynccontextmanager
async def open_run(url: str, name: str, folder: Path) -> AsyncIterator[Run]:
    invite = Invite(
        run=name,
        client="alice",
        secret=b"s" * 32,
        amqp_url=url,
        base_url="http://127.0.0.1:1/v1",
        policies=("main",),
        kinds=("math",),
        group_size=2,
    )
    async with AmqpBroker.open(url, name="test", deadline_s=120.0) as broker:
        await broker.declare(name, policies=("main",), kinds=("math",))
        yield Run(broker, invite, folder)


@pytest.fixture
def opened() -> Any:
    return open_run


@pytest.fixture
def run_in(amqp_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`async with run_in() as run`: not a fixture's generator, because a client belongs to one task."""
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path / "spool"))
    return lambda: open_run(amqp_url, run_name, tmp_path)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python code as a process of its own in the test's folder; killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@pytest.fixture
def wait_for_line() -> Any:
    """Wait until a process has printed a line that begins with a word, or has one inside."""

    async def wait(process: subprocess.Popen[str], word: str, *, inside: bool = False) -> str:
        assert process.stdout is not None
        seen = ""
        while line := await asyncio.to_thread(process.stdout.readline):
            seen += line
            if line.startswith(word) or (inside and word in line):
                return line.strip()
        raise AssertionError(f"it ended without saying {word!r}:\n{seen}")

    return wait
