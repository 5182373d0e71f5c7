"""A collector of several processes on a real broker: each of them is killed while episodes come in."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys

import pytest

from integration.collector.test_killed import GROUP_SIZE, NUM_GROUPS, gone, learn, play
from support.collector_process import collector, make_job
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.collector.ledger import read_fates
from swarmq.runtime.processes import find_children

pytestmark = pytest.mark.broker

PROCESSES = 3


@pytest.fixture
def job(tmp_path, run_name, amqp_url, monkeypatch):
    monkeypatch.setenv(BROKER_ANSWERED_ENV, "1")  # a slow broker is waited for
    groups = {"group_size": GROUP_SIZE, "groups_per_batch": 2, "max_staleness": 4}
    return make_job(tmp_path, run_name, amqp_url, processes=PROCESSES, **groups)


async def test_nothing_is_lost_or_doubled_when_each_process_is_killed(job):
    trained: list[str] = []
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker:
        turn_queues = job.collector.turn_queues
        await broker.declare(job.run, policies=job.policies, kinds=job.mix, turn_queues=turn_queues)
        async with asyncio.timeout(400), asyncio.TaskGroup() as tasks:
            killer = tasks.create_task(kill_each(job, trained))
            learning = tasks.create_task(learn(broker, job, trained))
            await play(broker, job, random.Random(1))
            await learning
            killer.cancel()
        async with collector(job) as last:
            await gone(broker, job)
            last.send_signal(signal.SIGTERM)
            assert await last.wait() == 0
            depths = await broker.depths(topology.list_turns(job.run, turn_queues))
        assert [depth.ready for depth in depths.values()] == [0] * turn_queues
    assert len(trained) == len(set(trained)) == NUM_GROUPS * GROUP_SIZE
    fates = read_fates(job.run_folder.inbox)
    assert {(fate.state, fate.reason) for fate in fates.values()} == {("trained", "")}
    assert fates.keys() == set(trained)


async def kill_each(job, trained):
    """Kill the first process, then each worker, once it has done some work; the last collector is left alone."""
    for number in range(PROCESSES):
        async with collector(job) as process:
            while len(trained) < (number + 1) * NUM_GROUPS * GROUP_SIZE // (PROCESSES + 2):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            workers = sorted(find_children(process.pid, sys.executable))
            assert len(workers) == PROCESSES - 1
            os.kill([process.pid, *workers][number], signal.SIGKILL)
            assert await process.wait() != 0
        async with asyncio.timeout(30):
            while any(map(is_there, workers)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    async with collector(job):
        await asyncio.Event().wait()


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
