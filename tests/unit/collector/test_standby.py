"""A collector's end of the log: takeovers, late transactions, and the run folder's registries."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from swarmq.broker import Deliveries, Depth, topology
from swarmq.broker.deliveries import Arrival
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.log import LogPosition
from swarmq.collector.service import Collector, CollectorIntervals
from swarmq.collector.standby import StandbyIntervals, StandbyLog
from swarmq.collector.store import Store, encode_rows
from swarmq.config import SwarmJob
from swarmq.errors import CollectorError, FencedError
from swarmq.messages import LogEntry, Message, encode
from swarmq.testing import MemoryBroker

INTERVALS = StandbyIntervals(check_s=0.0, grace_s=0.0, retry_s=0.0)
LOG = topology.log("r")


class Settler:
    async def ack(self, tag: int, *, through: bool) -> None: ...

    async def reject(self, tag: int) -> None: ...


class Stream:
    """The broker's stream, and an inbox that has a consumer while `is_led`."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.is_declared = self.is_led = False
        self._readers: list[Deliveries] = []

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        assert queue == LOG
        assert isinstance(message, LogEntry)
        self.entries.append(message)
        for reader in self._readers:
            self._put(reader, len(self.entries) - 1)

    async def depths(self, queues):
        there = {topology.inbox("r"): Depth(0, int(self.is_led))} | ({LOG: Depth(0, 0)} if self.is_declared else {})
        return {queue: there[queue] for queue in queues if queue in there}

    async def declare_stream(self, stream: str) -> None:
        self.is_declared = True

    @contextlib.asynccontextmanager
    async def read_stream(self, stream, *, prefetch, next_offset, skip):
        reader = Deliveries(bury=None)
        for offset in range(next_offset(), len(self.entries)):
            self._put(reader, offset)
        self._readers.append(reader)
        yield reader

    def _put(self, reader: Deliveries, offset: int) -> None:
        headers = {topology.STREAM_OFFSET: offset}
        reader.put(Arrival(Settler(), offset, encode(self.entries[offset]), headers, False, LOG))


@pytest.fixture
def stream():
    return Stream()


class Host:
    """A host of the run, with a run folder and a store."""

    def __init__(self, folder) -> None:
        self.job = SwarmJob.build({"run": "r", "folder": str(folder), "policies": {"main": {"model": "m"}}})
        self.job.run_folder.path.mkdir(parents=True)
        self.store = Store(None, run="r")

    def log(self, stream):
        return StandbyLog.open(stream, self.store, self.job, intervals=INTERVALS)


@pytest.fixture
def hosts(tmp_path):
    return [Host(tmp_path / name) for name in "ab"]


async def commit(host, log, *effects):
    """A transaction of a leader."""
    with host.store.transaction():
        for effect in effects:
            host.store.write(effect)
        host.store.save_position(await log.append(encode_rows(effects)))


async def until(holds):
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def pair(stream, hosts):
    """A leader, and a standby that has its store."""
    one, other = hosts
    async with one.log(stream) as leading, asyncio.timeout(20):
        await leading.lead()
        stream.is_led = True
        await commit(one, leading, do.Open("e", 1.0))
        async with other.log(stream) as following:
            await until(lambda: any(entry.what == "join" for entry in stream.entries))
            await asyncio.sleep(0)
            await leading.answer_joins()
            await until(lambda: other.store.position().number == 1)
            yield leading, following


async def test_a_standby_gets_the_store_and_then_every_transaction(stream, hosts):
    async with pair(stream, hosts) as (leading, _):
        await commit(hosts[0], leading, do.Close("dropped", "silent", "e"))
        await until(lambda: hosts[1].store.position().number == 2)
    assert hosts[1].store.ended("e") == hosts[0].store.ended("e")


async def test_a_leader_that_comes_late_is_refused_rolls_back_and_follows(stream, hosts):
    one, other = hosts
    async with pair(stream, hosts) as (leading, following):
        stream.is_led = False
        await following.lead()
        with pytest.raises(FencedError):
            await commit(one, leading, do.Open("late", 1.0))
        await commit(other, following, do.Open("new", 1.0))
        assert one.store.position().number == 1  # nothing is applied while the collector may still use the store
        leading.release()
        await until(lambda: one.store.position().number == 2)
    for host in hosts:
        assert [name for (name,) in host.store._all("SELECT id FROM episodes ORDER BY id")] == ["e", "new"]


async def test_a_standby_does_not_claim_while_the_inbox_has_a_consumer(stream, hosts):
    async with pair(stream, hosts) as (_, following):
        waiting = asyncio.create_task(following.lead())
        for _ in range(50):
            await asyncio.sleep(0)
        assert [entry.sender for entry in stream.entries if entry.what == "claim"] == [stream.entries[0].sender]
        waiting.cancel()


async def test_a_collector_that_takes_over_does_not_wait_until_the_leader_is_gone(stream, hosts):
    async with pair(stream, hosts) as (leading, following):
        await following.lead(take_over=True)
        with pytest.raises(FencedError):
            await commit(hosts[0], leading, do.Open("late", 1.0))
        await commit(hosts[1], following, do.Open("new", 1.0))


async def test_the_collector_that_led_last_does_not_wait_for_others_to_come_back(stream, hosts):
    async with pair(stream, hosts) as (_, following):
        assert hosts[0].store.position().led
        assert not hosts[1].store.position().led
        stream.is_led = False
        await following.lead()
        await until(lambda: hosts[1].store.position().led)


async def test_registries_follow_the_leader_unless_they_were_edited_on_this_host(stream, hosts):
    one, other = hosts
    proxies, clients = other.job.run_folder.proxies, other.job.run_folder.clients
    async with pair(stream, hosts) as (leading, _):
        await commit(one, leading, do.SaveFile(proxies.name, b"[1]"), do.SaveFile(clients.name, b"[1]"))
        await until(clients.exists)
        clients.write_bytes(b"[mine]")
        await commit(one, leading, do.SaveFile(proxies.name, b"[2]"), do.SaveFile(clients.name, b"[2]"))
        await until(lambda: proxies.read_bytes() == b"[2]")
        await commit(one, leading, do.SaveFile(proxies.name, b""))
        await until(lambda: not proxies.exists())
    assert clients.read_bytes() == b"[mine]"


async def test_a_transaction_in_the_log_is_committed_when_the_disk_has_room_again_and_not_decided_twice(
    stream, hosts, say
):
    host = hosts[0]
    job = SwarmJob.build(
        {"run": "r", "folder": host.job.folder, "mix": {"math": 1.0}, "policies": {"main": {"model": "m"}}}
    )
    store, broker, stop = FullAtCommit(None, run="r"), MemoryBroker(), asyncio.Event()
    await broker.declare("r", policies=job.policies, kinds=job.mix)
    async with StandbyLog.open(stream, store, job, intervals=INTERVALS) as log, asyncio.timeout(20):
        await log.lead()
        collector = Collector(job, broker, store, log=log, intervals=CollectorIntervals(retry_s=0.0))
        running = asyncio.create_task(collector.run(stop))
        await until(lambda: store.position().number)
        store.num_refusals = 2
        await broker.publish(topology.inbox("r"), say.begin())
        await until(lambda: collector.read_state()["begun"] and not store.num_refusals)
        await until(lambda: not broker.stored(topology.inbox("r")))
        stop.set()
        await running
    assert collector.read_state()["duplicates"] == 0
    numbers = [entry.number for entry in stream.entries if entry.what == "transaction"]
    assert numbers == list(range(1, store.position().number + 1))


class FullAtCommit(Store):
    """A store whose next `num_refusals` commits with a place in the log fail."""

    num_refusals = 0

    @contextlib.contextmanager
    def transaction(self):
        before = self.position()
        with super().transaction():
            yield
            if self.num_refusals and self.position() != before:
                self.num_refusals -= 1
                raise CollectorError("disk full")


async def test_a_store_of_a_deleted_log_is_refused(stream, hosts):
    with hosts[0].store.transaction():
        hosts[0].store.save_position(LogPosition(log="l", term=1))
    with pytest.raises(CollectorError, match=f"{LOG} was deleted"):
        async with hosts[0].log(stream):
            pass
