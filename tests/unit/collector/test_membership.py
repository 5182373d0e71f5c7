"""The collector publishes what the registries list, and edits them for engines and proxies on other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import msgspec
import pytest

from swarmq.collector.main import check_like_leader
from swarmq.collector.membership import MembershipKeeper
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.errors import CollectorError, ConfigError, SwarmqError
from swarmq.hosts.follow import FollowedMembership
from swarmq.hosts.members import Members, number_proxy
from swarmq.hosts.register import join, leave
from swarmq.messages import Registration
from swarmq.registries.clients import ClientRegistry
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.hosts import HostRegistry, InvitedHost, read_hosts
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.files import write_atomically
from swarmq.testing import MemoryBroker

LOCAL = "http://127.0.0.1:1"


@pytest.fixture
def job(tmp_path):
    policy = {"model": "m", "engine": {"urls": [LOCAL]}}
    broker = {"url": "amqp://guest:password@127.0.0.1/"}
    tree = {"run": "r", "folder": str(tmp_path), "mix": {"math": 1.0}, "policies": {"main": policy}, "broker": broker}
    return SwarmJob.build(tree)


@pytest.fixture
async def broker(job):
    broker = MemoryBroker()
    await broker.declare(job.run, policies=job.policies, kinds=job.mix)
    return broker


@pytest.fixture
async def url():
    """URL at which something accepts connections."""
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def put_host(job, **parts):
    with HostRegistry.open(job.run_folder.hosts) as hosts:
        hosts.put(InvitedHost(name="gpu2", added_at=0.0, expires_at=100.0, broker_user="r.host:gpu2", **parts))


@contextlib.asynccontextmanager
async def running(*loops):
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(loop) for loop in loops]
        yield
        for task in started:
            task.cancel()


@contextlib.asynccontextmanager
async def collecting(job, broker, *, clock=time.time):
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Collector(job, broker, Store(None, run="r"), clock=clock).run(stop))
        yield
        stop.set()


async def published(broker, fact=lambda _: True):
    """The newest published membership, once `fact` is true of it."""
    async with asyncio.timeout(60):
        while True:
            found = [event.fields for event in broker.emitted if event.name == "members"]
            if found and fact(newest := msgspec.convert(found[-1], Members)):
                return newest
            await asyncio.sleep(0)


async def test_a_change_of_any_registry_is_published(job, broker):
    async with running(MembershipKeeper(job, broker, poll_s=0, repeat_s=1e6).run()):
        members = await published(broker)
        assert (members.engines, members.proxies, members.revoked) == ({"main": (LOCAL,)}, (), ())
        EngineRegistry(job).add("main", "http://gpu2:8000")
        ProxyRegistry(job.run_folder.proxies).add("http://gpu2:8001/v1")
        with ClientRegistry.open(job.run_folder.clients) as clients:
            clients.remove("alice", now=1.0)
        members = await published(broker, lambda members: members.revoked == ("alice",) and members.proxies)
        assert members.engines == {"main": (LOCAL, "http://gpu2:8000")}
        assert len([event for event in broker.emitted if event.name == "members"]) <= 4


async def test_registries_are_read_again_only_after_a_change(job, broker):
    EngineRegistry(job).add("main", "http://gpu2:8000")
    path = job.run_folder.roster
    async with running(MembershipKeeper(job, broker, poll_s=0, repeat_s=1e6).run()):
        await published(broker, lambda members: "http://gpu2:8000" in members.engines["main"])
        before, replaced = path.stat(), path.read_bytes().replace(b"gpu2", b"gpu3")
        path.write_bytes(replaced)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len([event for event in broker.emitted if event.name == "members"]) == 1, "the stamp did not change"
        write_atomically(path, replaced)
        await published(broker, lambda members: "http://gpu3:8000" in members.engines["main"])


async def test_what_did_not_reach_the_broker_is_published_again(job, broker):
    broker.alarm(on=True)
    async with running(MembershipKeeper(job, broker, poll_s=0, repeat_s=1e6).run()):
        for _ in range(20):
            await asyncio.sleep(0)
        broker.alarm(on=False)
        await published(broker)


async def test_no_secret_and_no_address_of_the_broker_is_published(job, broker):
    async with running(MembershipKeeper(job, broker).run()):
        members = await published(broker)
    assert "password" not in msgspec.json.encode(members).decode()
    assert {"broker", "folder"}.isdisjoint(members.settings)


async def test_an_engine_joins_and_leaves_as_often_as_it_says_so(job, broker, url):
    async with collecting(job, broker):
        for _ in range(2):
            await join(broker, "r", "engine", url, policy="main")
            assert EngineRegistry(job).urls() == {"main": (LOCAL, url)}
        for _ in range(2):
            assert await leave(broker, "r", "engine", url, policy="main")
            assert EngineRegistry(job).urls() == {"main": (LOCAL,)}


async def test_a_proxy_joins_and_leaves(job, broker, url):
    async with collecting(job, broker):
        await join(broker, "r", "proxy", f"{url}/v1")
        assert ProxyRegistry(job.run_folder.proxies).urls() == (f"{url}/v1",)
        await leave(broker, "r", "proxy", f"{url}/v1")
        assert ProxyRegistry(job.run_folder.proxies).urls() == ()


async def test_what_the_runs_host_cannot_reach_is_refused_with_its_address(job, broker, url):
    port = url.rpartition(":")[2]
    async with collecting(job, broker):
        for wrong, why in [
            ("http://127.0.0.1:9", r"cannot connect to 127.0.0.1:9 \(Connection refused\)"),
            ("http://nowhere.invalid:8000", "cannot connect to nowhere.invalid:8000"),
            (f"http://127.0.0.1:{port}x", "not a valid URL"),
        ]:
            with pytest.raises(ConfigError, match=why):
                await join(broker, "r", "engine", wrong, policy="main")
        with pytest.raises(ConfigError, match=f"refuses {url}: the run's host cannot connect to 127.0.0.1:9"):
            await join(broker, "r", "engine", url, policy="main", receiver_url="http://127.0.0.1:9")
        with pytest.raises(ConfigError, match="no policy 'other': the run has main"):
            await join(broker, "r", "engine", url, policy="other")
    assert not job.run_folder.roster.exists()


async def test_a_join_without_an_answer_is_withdrawn(job, broker, url):
    with pytest.raises(SwarmqError, match="has not answered .* within 0.01 s: check that the run is up"):
        await join(broker, "r", "engine", url, policy="main", patience_s=0.01)
    assert not await leave(broker, "r", "proxy", "http://127.0.0.1:9/v1", patience_s=0.01)
    async with collecting(job, broker):
        await join(broker, "r", "proxy", f"{url}/v1")
    assert EngineRegistry(job).urls() == {"main": (LOCAL,)}


async def test_a_host_joins_while_its_invite_holds_and_what_runs_there_is_recorded(job, broker, url):
    path = job.run_folder.hosts
    put_host(job)
    now = 50.0
    keeper = MembershipKeeper(job, broker, clock=lambda: now, poll_s=0, repeat_s=1e6)

    async def answer(number, action, process="engine", host="gpu2"):
        policy = "main" if process == "engine" else ""
        registration = Registration(
            run="r", registration_id=str(number), action=action, process=process, url=url, policy=policy
        )
        keeper.take(registration, host)
        while True:
            for event in broker.emitted:
                if event.name == "registration" and event.fields["registration_id"] == str(number):
                    return event.fields
            await asyncio.sleep(0)

    async with running(keeper.run()):
        assert (await answer(1, "join"))["state"] == "accepted"
        assert read_hosts(path)["gpu2"].engines == {url: "main"}
        assert (await answer(2, "leave"))["state"] == "accepted"
        assert read_hosts(path)["gpu2"].engines == {}
        now = 101.0
        refused = await answer(3, "join", "proxy")
        assert (refused["state"], "expired" in refused["text"]) == ("refused", True)
        assert "not among the invited hosts" in (await answer(4, "join", host="gpu3"))["text"]
    assert not job.run_folder.proxies.exists()


async def test_a_hosts_proxy_that_falls_silent_is_out_of_the_list_until_it_is_heard_again(job, broker):
    proxies, remote, local = ProxyRegistry(job.run_folder.proxies), "http://gpu2:8000/v1", f"{LOCAL}/v1"
    proxies.write([local, remote])
    put_host(job, proxies=(remote,))
    now = 0.0
    keeper = MembershipKeeper(job, broker, poll_s=0, repeat_s=1e6, silent_s=0.001, monotonic=lambda: now)
    async with running(keeper.run()):
        assert (await published(broker)).proxies == (local, remote)
        now = 1.0
        await published(broker, lambda members: members.proxies == (local,))
        assert read_hosts(job.run_folder.hosts)["gpu2"].proxies == (remote,)
        keeper.record_event(f"proxy.{number_proxy(remote)}")
        await published(broker, lambda members: members.proxies == (local, remote))


async def test_events_that_were_lost_on_the_way_to_the_collector_are_no_silence(job, broker):
    now = 0.0
    url, proxies = "http://gpu2:8000/v1", ProxyRegistry(job.run_folder.proxies)
    put_host(job, proxies=(url,))
    proxies.write([url])
    keeper = MembershipKeeper(job, broker, silent_s=10.0, monotonic=lambda: now)
    now = 11.0
    keeper.reset_silence()
    assert keeper._update_proxy_list() == []
    now = 22.0
    assert keeper._update_proxy_list() == [
        f"proxy {url} of host gpu2 is silent: clients are not sent to it until it is heard again"
    ]


async def test_what_runs_on_other_hosts_is_used_again_after_the_run_was_started_again(job, broker, url):
    gone = "http://127.0.0.1:9"
    put_host(job, engines={url: "main", gone: "main"}, proxies=(f"{url}/v1",))
    keeper = MembershipKeeper(job, broker, poll_s=0, repeat_s=1e6, silent_s=1.0)
    async with running(keeper.run()):
        keeper.record_event(f"proxy.{number_proxy(f'{url}/v1')}")
        members = await published(broker, lambda members: members.proxies and len(members.engines["main"]) > 1)
    assert (members.engines, members.proxies) == ({"main": (LOCAL, url)}, (f"{url}/v1",))


@pytest.mark.parametrize(("behind_s", "fits"), [(0.0, True), (7200.0, False)])
async def test_a_standby_whose_clock_is_hours_off_says_so_and_does_not_take_over(job, broker, behind_s, fits):
    async with collecting(job, broker, clock=lambda: time.time() - behind_s):
        await published(broker)
        if fits:
            await check_like_leader("r", broker)
            return
        with pytest.raises(CollectorError, match=r"cannot take over: this host's clock is 7\d\d\d s ahead of"):
            await check_like_leader("r", broker)


async def test_whoever_comes_late_gets_everything_at_once(job, broker):
    async with collecting(job, broker):
        await published(broker)
        membership = FollowedMembership("r", broker, source="host.gpu2", is_run_on_this_host=True)
        states = []
        membership.handlers.append(lambda event: states.append((event.name, membership.latest is None)))
        async with running(membership.follow()):
            assert await membership.wait_current(60)
        assert membership.urls() == {"main": (LOCAL,)}
        assert ("state", True) in states, "changed settings are known before the membership counts as current"
