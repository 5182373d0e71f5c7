"""The collector as a process on a real broker, killed again and again while pieces come in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
from array import array
from collections import defaultdict

import msgspec
import pytest

from support.collector_process import START, collector, make_job
from swarmq.broker import Depth, topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.broker.session import open_session
from swarmq.collector.ledger import read_fates
from swarmq.collector.store import Store
from swarmq.errors import BrokerLostError, CollectorError
from swarmq.learner.distributed.processes import run_collector
from swarmq.messages import EpisodeBegin, EpisodeEnd, Rollout, Slot, StepReport, Ticket, Turn, encode
from swarmq.transcripts.read import read, scan

pytestmark = pytest.mark.broker

NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 30, 4, 5
KILLS = 6


@pytest.fixture
def job(tmp_path, run_name, amqp_url, monkeypatch):
    monkeypatch.setenv(BROKER_ANSWERED_ENV, "1")  # a slow broker is waited for
    return make_job(tmp_path, run_name, amqp_url, group_size=GROUP_SIZE, groups_per_batch=2, max_staleness=4)


async def test_nothing_is_lost_or_doubled_when_the_collector_is_killed(job):
    rng = random.Random(1)
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker:
        await broker.declare(job.run, policies=job.policies, kinds=job.mix)
        trained: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            killer = tasks.create_task(keep_killing(job, rng))
            learner = tasks.create_task(learn(broker, job, trained))
            await play(broker, job, rng)
            await learner
            killer.cancel()
        async with collector(job) as last:
            await gone(broker, job)
            last.send_signal(signal.SIGTERM)
            assert await last.wait() == 0
    assert len(trained) == len(set(trained)) == NUM_GROUPS * GROUP_SIZE
    told = read_fates(job.run_folder.inbox)
    assert {(fate.state, fate.reason) for fate in told.values()} == {("trained", "")}
    assert told.keys() == set(trained)
    recorded = [read(job.run_folder.transcripts, place) for place, _ in scan(job.run_folder.transcripts)]
    names = [transcript.meta.episode_id for transcript in recorded]  # all can be read, whenever their writer was killed
    assert len(names) == len(set(names))
    assert set(names) <= set(trained)
    assert len(names) >= len(trained) // 2


async def keep_killing(job, rng):
    """Start it, let it work for a moment chosen by the seed, SIGKILL; the last one is left alone."""
    for _ in range(KILLS):
        async with collector(job):
            await asyncio.sleep(rng.uniform(1.0, 2.5))
    async with collector(job):
        await asyncio.Event().wait()


async def play(broker, job, rng):
    """Clients and proxy: take a ticket, begin, turns, end; a tenth of everything is sent twice."""
    slots = [Slot(task_id=f"t{g}", repeat=r) for g in range(NUM_GROUPS) for r in range(GROUP_SIZE)]
    async with broker.consume(topology.tickets(job.run, "math"), prefetch=4) as tickets:
        for number, slot in enumerate(slots):
            delivery = await anext(tickets)
            assert isinstance(delivery.message, Ticket)
            pieces = episode(job.run, f"e{number}", slot, delivery.message.ticket_id, names_calls=rng.random() < 0.5)
            for piece in pieces:
                queue = topology.inbox(job.run)
                if isinstance(piece, Turn):
                    queue = topology.turns_of(job.run, piece.episode_id, job.collector.turn_queues)
                await broker.publish(queue, piece)
                if rng.random() < 0.1:
                    await broker.publish(queue, piece)
            with contextlib.suppress(BrokerLostError):
                await delivery.ack()


def episode(run, name, slot, ticket, *, names_calls=True):
    common = {"run": run, "episode_id": name}
    yield EpisodeBegin(
        **common, slot=slot, kind="math", group_size=GROUP_SIZE, policies=("main",), client_id="c", ticket_id=ticket
    )
    for number in range(NUM_TURNS):
        yield Turn(
            **common,
            policy="main",
            call_id=f"c{number}",
            request_id=f"c{number}",
            parent=f"c{number - 1}" if number else None,
            shared=8 * number,
            prompt_ids=array("i", range(4)).tobytes(),
            sampled_ids=array("i", range(4)).tobytes(),
            logprobs=array("f", [-1.0] * 4).tobytes(),
        )
    calls = tuple(f"c{n}" for n in range(NUM_TURNS)) if names_calls else None
    yield EpisodeEnd(**common, status="finished", rewards={"main": 1.0}, calls=calls)


async def learn(broker, job, trained):
    """Take whole groups, report them; duplicates must be equal to the byte."""
    seen: dict[str, bytes] = {}
    groups: dict[str, set[str]] = defaultdict(set)
    async with broker.consume(topology.ready(job.run, "main"), prefetch=500) as deliveries:
        while len(trained) < NUM_GROUPS * GROUP_SIZE:
            delivery = await anext(deliveries)
            message = delivery.message
            assert isinstance(message, Rollout)
            assert [turn.call_id for turn in message.turns] == [f"c{n}" for n in range(NUM_TURNS)]
            plain = encode(msgspec.structs.replace(message, term=0))  # another collector has another term
            assert seen.setdefault(message.episode_id, plain) == plain
            members = groups[message.group_id]
            new = message.episode_id not in members
            members.add(message.episode_id)
            if new and len(members) == message.group_members:
                trained += members
                report = StepReport(
                    run=job.run, policy="main", record=len(trained), version=len(trained) // 8, trained=tuple(members)
                )
                await broker.publish(topology.inbox(job.run), report)
            with contextlib.suppress(BrokerLostError):
                await delivery.ack()


async def gone(broker, job):
    """Returns once the last report is in the ledger."""
    async with asyncio.timeout(800), broker.events(job.run) as events:
        async for event in events:
            if event.name == "state" and event.fields["trained"] == NUM_GROUPS * GROUP_SIZE:
                return


async def test_a_second_collector_ends_with_a_line_that_names_the_first(job):
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker:
        await broker.declare(job.run, policies=job.policies, kinds=job.mix)
        async with broker.events(job.run) as events, collector(job) as first:
            await anext(event async for event in events if event.source == "collector")
            second = await asyncio.create_subprocess_exec(
                sys.executable, "-c", START, f"{job.folder}/job.toml", stderr=asyncio.subprocess.PIPE
            )
            _, errors = await second.communicate()
            assert second.returncode != 0
            assert f"in use by the collector with pid {first.pid}" in errors.decode()


async def test_a_drained_collector_leaves_nothing_unsent(job):
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker:
        await broker.declare(job.run, policies=job.policies, kinds=job.mix)
        async with broker.consume(topology.tickets(job.run, "math"), prefetch=100) as tickets:
            async with collector(job) as process:
                await anext(tickets)
                os.kill(process.pid, signal.SIGTERM)
                assert await process.wait() == 0
            issued = [await anext(tickets) for _ in range(5 * 2 * GROUP_SIZE - 1)]
    assert len(issued) == 39


async def test_what_was_in_deleted_queues_comes_again(job):
    tickets, ready = topology.tickets(job.run, "math"), topology.ready(job.run, "main")
    window = 5 * 2 * GROUP_SIZE
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker, collector(job):
        await held_by(broker, tickets, window)
        for repeat in range(GROUP_SIZE):
            slot = Slot(task_id="t", repeat=repeat)
            for piece in episode(job.run, f"e{repeat}", slot, f"math.{repeat + 1}"):
                await broker.publish(topology.inbox(job.run), piece)
        async with broker.consume(ready, prefetch=GROUP_SIZE) as deliveries:
            for _ in range(GROUP_SIZE):
                await anext(deliveries)
        async with broker.events(job.run) as events, open_session(job.broker.url, name="operator") as session:
            for queue in (tickets, ready):
                await session.call(session.channel.queue_delete(queue))
            gone = {tickets, ready}
            while gone:
                told = await anext(event async for event in events if event.name == "warning")
                gone -= {queue for queue in gone if queue in told.fields["text"]}
        async with broker.consume(ready, prefetch=GROUP_SIZE) as deliveries:
            again = [(await anext(deliveries)).message for _ in range(GROUP_SIZE)]
        assert sorted(message.episode_id for message in again) == [f"e{repeat}" for repeat in range(GROUP_SIZE)]
        assert {message.group_members for message in again} == {GROUP_SIZE}
        async with broker.consume(tickets, prefetch=window) as deliveries:
            names = {(await anext(deliveries)).message.ticket_id for _ in range(window - GROUP_SIZE)}
        assert names == {f"math.{number}" for number in range(GROUP_SIZE + 1, window + 1)}


async def test_the_collector_beside_a_learner_is_started_again_when_it_dies_and_leaves_with_the_learner(job):
    inbox = topology.inbox(job.run)
    async with (
        AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker,
        broker.events(job.run) as events,
    ):
        with run_collector(job, "main"):
            await anext(event async for event in events if event.name == "state")
            with pytest.raises(CollectorError, match="in use by the collector with pid") as refused:
                Store(job.run_folder.inbox, run=job.run)
            os.kill(int(re.search(r"pid (\d+)", str(refused.value))[1]), signal.SIGKILL)
            await broker.publish(inbox, next(episode(job.run, "e", Slot(task_id="t", repeat=0), "math.1")))
            await anext(event async for event in events if event.name == "state" and event.fields["begun"])
        async with asyncio.timeout(120):
            while (await broker.depths([inbox]))[inbox].consumers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def held_by(broker, queue, num):
    """Returns once so many messages wait there."""
    while (depths := await broker.depths([queue])).get(queue, Depth(0, 0)).ready < num:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert depths[queue].ready == num
