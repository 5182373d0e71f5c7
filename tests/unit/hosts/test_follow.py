"""A membership is current only as long as no event can have been missed."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import pytest

from swarmq import keys
from swarmq.errors import ConfigError, KeyRefusedError
from swarmq.hosts.follow import FollowedMembership, check_same_run, join_run
from swarmq.hosts.members import Members, build_job
from swarmq.messages import Event
from swarmq.testing import MemoryBroker
from swarmq.version import __version__

GPU2 = "http://gpu2:8000"


def members(**fields):
    given = {
        "engines": {"main": ["http://127.0.0.1:1", GPU2]},
        "proxies": [],
        "revoked": [],
        "resumed_at": {},
        "settings": {},
        "models": {},
        "swarmq": __version__,
    }
    return msgspec.convert({**given, **fields}, Members)


def members_event(present, *asks, at=None, source="collector"):
    fields = msgspec.to_builtins(present) | {"answers": asks}
    return Event(run="r", source=source, name="members", at=time.time() if at is None else at, fields=fields)


class Collector:
    """Of the test: it answers what it is asked while it is up."""

    def __init__(self, broker):
        self.broker, self.revoked, self.is_up = broker, (), True
        self.asked = 0

    async def run(self):
        async with self.broker.events("r") as events:
            async for event in events:
                if event.name == "members_wanted":
                    self.asked += 1
                    if self.is_up:
                        await self.broker.emit(members_event(members(revoked=self.revoked), event.fields["ask"]))


@pytest.fixture
def broker():
    return MemoryBroker()


@contextlib.asynccontextmanager
async def following(broker, collector, **how):
    membership = FollowedMembership("r", broker, source="host.gpu2", ask_every_s=0.001, **how)
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(collector.run()), tasks.create_task(membership.follow())]
        yield membership
        for loop in loops:
            loop.cancel()


async def test_it_asks_until_the_collector_answers(broker):
    collector = Collector(broker)
    collector.is_up = False
    async with following(broker, collector) as membership:
        assert not await membership.wait_current(0.01)
        collector.is_up = True
        assert await membership.wait_current(60)
        assert collector.asked > 1


async def test_a_client_that_is_removed_during_an_outage_is_known_before_the_membership_is_current(broker):
    collector = Collector(broker)
    async with following(broker, collector) as membership:
        assert await membership.wait_current(60)
        broker.away(gone=True)
        assert not await membership.wait_current(0)
        collector.revoked = ("alice",)
        broker.away(gone=False)
        assert await membership.wait_current(60)
        assert "alice" in membership.revoked


async def test_silence_makes_it_stale_although_no_connection_was_lost(broker):
    now = 0.0
    collector = Collector(broker)
    async with following(broker, collector, clock=lambda: now) as membership:
        assert await membership.wait_current(60)
        collector.is_up = False
        asked, now = collector.asked, 11.0
        async with asyncio.timeout(60):
            while collector.asked == asked:  # noqa: ASYNC110 - no event, the clock of the test is read
                await asyncio.sleep(0)
        assert not await membership.wait_current(0)


async def test_only_the_answer_to_its_own_newest_question_makes_it_current(broker):
    membership = FollowedMembership("r", broker, source="host.gpu2")
    first = membership._ask
    membership.ask()
    membership.handle_event(members_event(members(revoked=["alice"]), first, "of-another"))
    assert not await membership.wait_current(0)
    assert "alice" in membership.revoked, "it is not newer, but nothing is known that is"
    membership.handle_event(members_event(members(), membership._ask, source="proxy.0"))
    assert not await membership.wait_current(0)
    membership.handle_event(members_event(members(), membership._ask))
    assert await membership.wait_current(0)
    assert "alice" in membership.revoked, "a removed name stays removed, also for a collector that does not know it"


def test_another_hosts_loopback_is_no_engine_of_this_host(broker):
    for is_local, urls in [(False, (GPU2,)), (True, ("http://127.0.0.1:1", GPU2))]:
        membership = FollowedMembership("r", broker, source="host.gpu2", is_run_on_this_host=is_local)
        membership.handle_event(members_event(members()))
        assert membership.urls() == {"main": urls}
        with pytest.raises(ConfigError, match="changed on the run's own host"):
            membership.add("main", GPU2)


@pytest.mark.parametrize(
    ("present", "lead_s", "why"),
    [
        (members(swarmq="0.0.1"), 0, f"collector has swarmq 0.0.1, this host {__version__}"),
        (members(), 90, "clock is 90 s ahead of"),
        (members(), -90, "clock is 90 s behind"),
    ],
)
def test_another_version_or_time_is_refused(broker, present, lead_s, why):
    membership = FollowedMembership("r", broker, source="host.gpu2")
    membership.handle_event(members_event(present, membership._ask, at=time.time() - lead_s))
    with pytest.raises(ConfigError, match=why):
        check_same_run(membership)


def test_the_settings_come_with_this_hosts_own_address_and_engines():
    settings = {"run": "r", "policies": {"main": {"model": "m", "sampling": {"max_tokens": 7}}}, "proxy": {"count": 2}}
    job = build_job(members(settings=settings), engines={"main": (GPU2,)}, proxy={"host": "gpu3"})
    assert (job.proxy.host, job.proxy.count, job.policies["main"].sampling.max_tokens) == ("gpu3", 2, 7)
    assert (job.policies["main"].engine.urls, job.broker.url) == ((GPU2,), None)


async def test_an_expired_invite_is_refused_before_anything_is_connected():
    invite = keys.HostInvite(
        run="r",
        host="gpu2",
        user="r.host:gpu2",
        amqp_url="amqp://nowhere.invalid/",
        root=b"r" * 32,
        engine_secret="s",
        expires_at=1000.0,
    )
    assert keys.HostInvite.decode(invite.encode() + "\n") == invite
    with pytest.raises(KeyRefusedError, match="'gpu2' for run 'r' expired at 1970-01-01 00:16:40"):
        async with join_run(invite, name="test"):
            pass
    later = msgspec.structs.replace(invite, expires_at=time.time() + 1000)
    with pytest.raises(ConfigError, match="nowhere.invalid:5672: the name"):
        async with join_run(later, name="test"):
            pass
    with pytest.raises(KeyRefusedError, match="`swarmq host add NAME` prints one"):
        keys.HostInvite.decode("swarmq-invite.abc")
