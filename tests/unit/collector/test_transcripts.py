"""Every closed episode of a collector at work has a transcript, after the commit that closed it and never without."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import closing

import msgspec
import pytest

from support.disk import StoreOnFullDisk
from swarmq.broker import topology
from swarmq.collector.decide import effects as do
from swarmq.collector.main import record_transcripts
from swarmq.collector.service import Collector, CollectorIntervals
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.messages import Message, Turn, encode
from swarmq.testing import MemoryBroker
from swarmq.transcripts.read import read as read_transcript
from swarmq.transcripts.read import scan

IN = topology.inbox("r")
SILENCE_S = 60.0


@pytest.fixture
def job(tmp_path):
    tree = {
        "run": "r",
        "folder": str(tmp_path),
        "mix": {"math": 1.0},
        "policies": {"main": {"model": "m"}},
        "groups": {"group_size": 1, "groups_per_batch": 2, "min_group": 1, "idle_timeout_s": SILENCE_S},
    }
    return SwarmJob.build(tree)


@pytest.fixture
async def broker(job):
    broker = MemoryBroker()
    await broker.declare(job.run, policies=job.policies, kinds=job.mix)
    return broker


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def collecting(job, broker, store, clock, **intervals):
    """A collector with transcripts at work; all of them written at the end."""
    stop = asyncio.Event()
    with record_transcripts(job) as transcripts:
        async with asyncio.TaskGroup() as tasks:
            collector = Collector(
                job, broker, store, transcripts=transcripts, clock=clock, intervals=CollectorIntervals(**intervals)
            )
            tasks.create_task(collector.run(stop))
            yield
            stop.set()


async def in_state(store, name, *states):
    """Wait until an episode is in one of these states."""
    while (store._one("SELECT state FROM episodes WHERE id = ?", name) or ("",))[0] not in states:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def found(job):
    return {meta.episode_id: meta for _, meta in scan(job.run_folder.transcripts)}


async def test_a_collector_that_ends_in_the_middle_leaves_the_transcripts_of_what_it_has_committed(job, broker, say):
    """As one that has lost a worker process, or finds that another one leads."""
    with closing(Store(None, run="r")) as store, record_transcripts(job) as transcripts:
        collector = Collector(job, broker, store, transcripts=transcripts)
        running = asyncio.create_task(collector.run(asyncio.Event()))
        for message in (say.begin("a", "a"), say.end("a", "failed", reason="boom")):
            await broker.publish(IN, message)
        await in_state(store, "a", "dropped")
        running.cancel()
        await asyncio.wait({running})
    assert list(found(job)) == ["a"]


async def test_every_fate_leaves_a_transcript_with_the_exact_messages(job, broker, say):
    clock = Clock()
    sent: dict[str, list[Message]] = {}

    async def publish(state: str, *messages: Message) -> None:
        for message in messages:
            sent.setdefault(message.episode_id, []).append(message)
            await broker.publish(IN, message)
        await in_state(store, message.episode_id, state)

    def attempt(name: str, *more: Message, task: str = "", **fields) -> list[Message]:
        words = msgspec.json.encode([{"role": "user", "content": name}])
        call = say.turn(f"{name}-1", name, prompt=(1, 2, len(name)), sampled=(3, 4), messages=words)
        return [say.begin(name, task or name, **fields), call, *more]

    with closing(Store(None, run="r")) as store:
        async with collecting(job, broker, store, clock, tick_s=0.01):
            await publish("published", *attempt("trained", say.end("trained", reward=0.25, metrics={"speed": 2.0})))
            await publish("published", *attempt("equal", say.end("equal")))
            await publish("dropped", *attempt("failed", say.end("failed", "failed", reason="boom")))
            await publish("dropped", *attempt("aborted", say.end("aborted", "aborted")))
            await publish("dropped", *attempt("superseded", say.end("superseded"), task="trained"))
            await publish("eval", *attempt("eval", say.end("eval", success=True), mode="eval"))
            await publish("open", *attempt("silent"))
            await publish("open", say.turn("stray-1", "stray"))
            await broker.publish(IN, say.consumed("trained", version=3, dropped={"equal": "equal_rewards"}))
            await in_state(store, "trained", "trained")
            clock.now += SILENCE_S / 2
            await publish("open", say.begin("open", "open"))
            clock.now += SILENCE_S / 2
            await in_state(store, "stray", "dropped")

    metas = found(job)
    assert {name: (meta.state, meta.reason) for name, meta in metas.items()} == {
        "trained": ("trained", ""),
        "equal": ("dropped", "equal_rewards"),
        "failed": ("dropped", "failed"),
        "aborted": ("dropped", "aborted"),
        "superseded": ("dropped", "superseded"),
        "eval": ("eval", "finished"),
        "silent": ("dropped", "silent"),
    }
    assert metas["trained"].outcomes == {"main": ("trained", 3, "")}
    assert metas["equal"].outcomes == {"main": ("dropped", 3, "equal_rewards")}
    assert metas["trained"].rewards == {"main": 0.25}
    assert metas["trained"].metrics == {"speed": 2.0}
    assert (metas["failed"].status, metas["failed"].detail) == ("failed", "boom")
    assert (metas["eval"].mode, metas["eval"].success) == ("eval", True)
    assert metas["silent"].status == ""
    assert metas["silent"].closed_at == metas["silent"].ended_at == 1000.0 + SILENCE_S
    assert metas["failed"].ended_at == 1000.0
    for position, meta in scan(job.run_folder.transcripts):
        transcript = read_transcript(job.run_folder.transcripts, position)
        begin, *others = sent[meta.episode_id]
        assert transcript.begin == begin
        assert transcript.turns == tuple(one for one in others if isinstance(one, Turn))
        if meta.state == "trained" or meta.reason == "equal_rewards":
            assert transcript.received == {f"{meta.episode_id}-1"}
        elif len(others) > 1:
            assert transcript.end == others[-1]
        else:
            assert transcript.end is None


async def test_members_of_a_group_that_is_too_small_leave_transcripts(job, broker, say):
    groups = msgspec.structs.replace(job.groups, group_size=3, min_group=2, deadline_s=5.0)
    clock = Clock()
    with closing(Store(None, run="r")) as store:
        async with collecting(msgspec.structs.replace(job, groups=groups), broker, store, clock, tick_s=0.01):
            for piece in (say.begin(group_size=3), say.turn(), say.end()):
                await broker.publish(IN, piece)
            await in_state(store, "e", "waiting")
            clock.now += 10.0
            await in_state(store, "e", "dropped")
    (meta,) = found(job).values()
    assert (meta.state, meta.reason, meta.status) == ("dropped", "group_too_small", "finished")
    assert (meta.ended_at, meta.closed_at) == (1000.0, 1010.0)
    assert read_transcript(job.run_folder.transcripts, "e").turns == (say.turn(),)


async def test_nothing_is_recorded_before_its_commit_and_everything_once(job, broker, say):
    with closing(StoreOnFullDisk()) as store:
        async with collecting(job, broker, store, Clock(), retry_s=0.0):
            for piece in (say.begin(), say.turn()):
                await broker.publish(IN, piece)
            await in_state(store, "e", "open")
            store.full = True
            await broker.publish(IN, say.end(status="failed"))
            await store.refused.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert found(job) == {}
            store.full = False
            await in_state(store, "e", "dropped")
    assert [meta.episode_id for _, meta in scan(job.run_folder.transcripts)] == ["e"]


async def test_a_run_without_transcripts_has_no_folder_and_no_count(job, broker, say):
    off = msgspec.structs.replace(job, transcripts=msgspec.structs.replace(job.transcripts, size_gb=0))
    with closing(Store(None, run="r")) as store:
        async with collecting(off, broker, store, Clock()):
            for piece in (say.begin(), say.end(status="failed")):
                await broker.publish(IN, piece)
            await in_state(store, "e", "dropped")
    assert not job.run_folder.transcripts.exists()
    assert "transcripts_lost" not in [event for event in broker.emitted if event.name == "state"][-1].fields


async def test_lost_transcripts_are_told_and_training_goes_on(job, broker, say):
    job.run_folder.path.mkdir()
    job.run_folder.transcripts.write_text("in the way")
    with closing(Store(None, run="r")) as store:
        async with broker.events("r") as events, collecting(job, broker, store, Clock(), state_s=0.01):
            for name in ("a", "b"):
                for piece in (say.begin(name, name), say.turn(episode=name), say.end(name, "failed")):
                    await broker.publish(IN, piece)
                await in_state(store, name, "dropped")
            warning = await anext(event async for event in events if event.name == "warning")
            assert store.ended("b").state == "dropped"
    assert str(job.run_folder.transcripts) in warning.fields["text"]
    warnings = [event for event in broker.emitted if event.name == "warning"]
    assert len(warnings) == 1


def test_episodes_that_learners_have_are_read_once(say):
    """What was read to publish an episode is kept for its transcript; a restarted collector reads it again."""
    with closing(Store(None, run="r")) as store:
        store.keeps_bodies = True
        with store.transaction():
            for effect in (
                do.Begin(encode(say.begin()), "e", 1.0),
                do.SaveTurn("e", encode(say.turn())),
                do.Finish("t/0/0", "math", "c", b"", "a", 2.0, "e", "main", encode(say.end(calls=("a",)))),
                do.Release("e"),
                do.SaveOutcome("e", "main", "t/0", "trained", 4, ""),
            ):
                store.write(effect)
        read_anew = store.closed(do.Close("trained", "", "e"), 3.0)
        assert store.parts("e") is not None
        store._db.execute("DELETE FROM turns")
        assert store.closed(do.Close("trained", "", "e"), 3.0) == read_anew
        assert [len(read_anew.turns), read_anew.outcomes] == [1, [("main", "trained", 4, "")]]
        assert store.closed(do.Close("trained", "", "e"), 3.0).turns == []
