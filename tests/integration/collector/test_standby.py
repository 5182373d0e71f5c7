"""Collectors of one run on two hosts: the leader is stopped and woken, and killed, while episodes come in."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sqlite3
import sys
from contextlib import closing

import msgspec
import pytest

from integration.collector.test_killed import GROUP_SIZE, NUM_GROUPS, learn, play
from support.collector_process import START, collector, make_job
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.broker.session import open_session
from swarmq.collector.ledger import read_fates
from swarmq.config import CollectorSettings
from swarmq.registries.proxies import ProxyRegistry
from swarmq.transcripts.read import read, scan

pytestmark = pytest.mark.broker

PROXY = "http://proxy:1/v1"
NUM_EPISODES = NUM_GROUPS * GROUP_SIZE


@pytest.fixture
def jobs(request, tmp_path, run_name, amqp_url, monkeypatch):
    """The job on two hosts, each with a run folder of its own. Their connections are missed after a few seconds of silence."""
    monkeypatch.setenv(BROKER_ANSWERED_ENV, "1")  # a slow broker is waited for
    groups = {"group_size": GROUP_SIZE, "groups_per_batch": 2, "max_staleness": 4}
    groups["processes"] = getattr(request, "param", 1)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return [make_job(folder, run_name, f"{amqp_url}?heartbeat=2", standby=True, **groups) for folder in folders]


async def until(holds):
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def state(broker, job):
    """Returns when a collector leads."""
    async with broker.events(job.run) as events:
        await anext(event async for event in events if event.name == "state")


def position(job):
    """Term and number of transactions in a collector's store."""
    try:
        with closing(sqlite3.connect(f"file:{job.run_folder.inbox}?mode=ro", uri=True)) as store:
            row = store.execute("SELECT value FROM meta WHERE key = 'log'").fetchone()
    except sqlite3.OperationalError:  # not there yet
        row = None
    told = json.loads(row[0]) if row else {}
    return told.get("term", 0), told.get("number", 0)


async def joined(job):
    """Returns when a standby has the leader's store."""
    await until(lambda: position(job)[0])


@pytest.mark.parametrize("jobs", [1, 2], ids=["one process", "two processes"], indirect=True)
async def test_a_standby_takes_over_from_a_leader_that_is_stopped_and_the_woken_one_from_its_killed_successor(jobs):
    one, other = jobs
    trained: list[str] = []
    async with AmqpBroker.open(one.broker.url, name="test", deadline_s=120.0) as broker:
        await broker.declare(one.run, policies=one.policies, kinds=one.mix, turn_queues=one.collector.turn_queues)
        async with asyncio.timeout(400), collector(one) as first, asyncio.TaskGroup() as tasks:
            await state(broker, one)
            async with collector(other) as second:
                await joined(other)
                learning = tasks.create_task(learn(broker, one, trained))
                playing = tasks.create_task(play(broker, one, random.Random(1)))
                await until(lambda: len(trained) >= NUM_EPISODES // 3)
                ProxyRegistry(one.run_folder.proxies).add(PROXY)
                await until(lambda: PROXY in ProxyRegistry(other.run_folder.proxies).urls())
                first.send_signal(signal.SIGSTOP)
                await until(
                    lambda: position(other)[0] == 2
                )  # its workers go on for a while, and may carry out what they have
                await until(lambda: len(trained) >= 2 * NUM_EPISODES // 3)
                first.send_signal(signal.SIGCONT)
                await until(lambda: position(one)[0] == 2)
                second.kill()
            await playing
            await learning
            await until(lambda: len(settled(one)) == NUM_EPISODES)
            await until(lambda: position(one)[0] == 3)  # also if the killed one had done all the work before
            first.send_signal(signal.SIGTERM)
            assert await first.wait() == 0
    assert len(trained) == len(set(trained)) == NUM_EPISODES
    assert settled(one) == set(trained)
    recorded = [read(one.run_folder.transcripts, place) for place, _ in scan(one.run_folder.transcripts)]
    assert {transcript.meta.episode_id for transcript in recorded} == set(trained)


def settled(job):
    return {episode for episode, fate in read_fates(job.run_folder.inbox).items() if fate.state == "trained"}


async def test_the_collector_of_a_run_that_is_started_again_takes_over_from_a_standby_and_brings_its_own_registries(
    jobs,
):
    one, other = jobs
    async with AmqpBroker.open(one.broker.url, name="test", deadline_s=120.0) as broker:
        await broker.declare(one.run, policies=one.policies, kinds=one.mix)
        async with asyncio.timeout(400), collector(other):
            await state(broker, other)
            ProxyRegistry(one.run_folder.proxies).add(PROXY)
            async with collector(one, "--take-over"):
                await until(lambda: position(one)[0] == 2)
                await until(lambda: PROXY in ProxyRegistry(other.run_folder.proxies).urls())


async def test_a_store_of_a_run_with_standbys_does_not_go_on_alone_while_their_log_exists(jobs):
    one, _ = jobs
    alone = msgspec.structs.replace(one, collector=CollectorSettings())
    log = topology.log(one.run)
    async with AmqpBroker.open(one.broker.url, name="test", deadline_s=120.0) as broker:
        await broker.declare(one.run, policies=one.policies, kinds=one.mix)
        async with collector(one):
            await state(broker, one)
        assert "set collector.standby = true" in await refusal(alone)
        async with open_session(one.broker.url, name="operator") as session:
            await session.call(session.channel.queue_delete(log))
        assert f"{log} was deleted" in await refusal(one)
        (one.run_folder.path.parent / "job.toml").write_text(alone.to_toml())
        async with collector(alone):
            await state(broker, one)
        assert position(one) == (0, 0)


async def refusal(job):
    """Return what a collector of this job prints before it ends."""
    (job.run_folder.path.parent / "job.toml").write_text(job.to_toml())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, f"{job.folder}/job.toml", stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode
    return errors.decode()
