"""A run in memory: its broker, an invite, and clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from swarmq.broker import topology
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.client.runners import attempts
from swarmq.keys import Invite, derive_client_secret
from swarmq.messages import EpisodeBegin, EpisodeEnd, Message, Ticket, decode
from swarmq.testing import MemoryBroker

RUN = "r1"
ROOT = b"r" * 32


def invite_of(**changes: Any) -> Invite:
    facts: dict[str, Any] = {
        "run": RUN,
        "client": "alice",
        "secret": derive_client_secret(ROOT, "alice"),
        "amqp_url": "amqp://nobody:nothing@127.0.0.1:1/",
        "base_url": "http://127.0.0.1:2/v1",
        "policies": ("main",),
        "kinds": ("math",),
        "group_size": 2,
    }
    return Invite(**{**facts, **changes})


class Swarm:
    """The far side of the client: what arrived in `in`, and the tickets it may use."""

    def __init__(self, invite: Invite, spool: Path) -> None:
        self.invite = invite
        self.spool = spool
        self.broker = MemoryBroker()
        self._issued = 0

    async def declare(self) -> None:
        await self.broker.declare(RUN, policies=self.invite.policies, kinds=self.invite.kinds)

    async def issue(self, count: int, kind: str = "math", **facts: Any) -> None:
        for _ in range(count):
            self._issued += 1
            ticket = Ticket(run=RUN, ticket_id=f"ticket-{self._issued}", kind=kind, **facts)
            await self.broker.publish(topology.tickets(RUN, kind), ticket)

    def open_broker(self, _invite: Invite, _name: str) -> contextlib.AbstractAsyncContextManager[MemoryBroker]:
        return contextlib.nullcontext(self.broker)

    def client(self, **options: Any) -> AsyncSwarmClient:
        return AsyncSwarmClient(self.invite, spool=self.spool, open_broker=self.open_broker, **options)

    def arrived(self, queue: str | None = None) -> list[Message]:
        return [decode(stored.body) for stored in self.broker.stored(queue or topology.inbox(RUN))]

    @property
    def begins(self) -> list[EpisodeBegin]:
        return [message for message in self.arrived() if isinstance(message, EpisodeBegin)]

    @property
    def ends(self) -> list[EpisodeEnd]:
        return [message for message in self.arrived() if isinstance(message, EpisodeEnd)]

    @property
    def spooled(self) -> list[str]:
        return sorted(path.name for path in self.spool.rglob("*.end"))


@pytest.fixture
def make_invite() -> Callable[..., Invite]:
    return invite_of


@pytest.fixture
def swarm_of(tmp_path: Path) -> Callable[..., Any]:
    async def make(**changes: Any) -> Swarm:
        swarm = Swarm(invite_of(**changes), tmp_path / "spool")
        await swarm.declare()
        return swarm

    return make


@pytest.fixture
async def swarm(swarm_of: Callable[..., Any]) -> Swarm:
    made: Swarm = await swarm_of()
    await made.issue(1000)
    return made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[AsyncEpisode], bool]], None]:
    """`impatient(hangs)`: attempts for which `hangs(ep)` have little time, the others as much as they need."""
    real = attempts._call_within

    def be(hangs: Callable[[AsyncEpisode], bool]) -> None:
        async def in_time(agent: attempts.Agent, ep: AsyncEpisode, timeout_s: float, slow_s: float) -> Any:
            return await real(agent, ep, 0.1 if hangs(ep) else timeout_s, slow_s)

        monkeypatch.setattr(attempts, "_call_within", in_time)

    return be


@pytest.fixture
async def client(swarm: Swarm) -> AsyncIterator[AsyncSwarmClient]:
    async with swarm.client() as opened:
        yield opened
