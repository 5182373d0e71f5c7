"""Two runs of one name on one broker would share their queues."""

import asyncio

import pytest

from swarmq.broker import Depth, topology
from swarmq.errors import SwarmqError
from swarmq.testing import MemoryBroker
from swarmq.up.deployment import check_run_is_down


async def test_a_second_run_of_one_name_is_refused_while_the_first_is_up():
    broker, told = MemoryBroker(), list[str]()
    await check_run_is_down(broker, "r", report=told.append)
    await broker.declare("r", policies=["main"], kinds=["default"])
    await check_run_is_down(broker, "r", report=told.append)
    async with broker.consume(topology.inbox("r"), prefetch=1):
        with pytest.raises(SwarmqError, match="run 'r' is already up on this broker"):
            await check_run_is_down(broker, "r", report=told.append)
    assert told == []


class Queues:
    """A broker with these numbers of consumers by queue."""

    def __init__(self, **consumers):
        self._consumers = {f"swarmq.r.{name}": count for name, count in consumers.items()}

    async def depths(self, queues):
        return {queue: Depth(0, count) for queue, count in self._consumers.items() if queue in queues}


async def test_a_run_starts_beside_a_standby_that_leads_but_not_beside_a_learner_or_a_collector_without_standbys():
    standby = {"log": 1, "in": 1}
    await check_run_is_down(Queues(**standby), "r", trained_beside_standby=("main",), report=print)
    for twin, queue in [
        (Queues(**standby, **{"main.ready": 1}), "swarmq.r.main.ready"),
        (Queues(**{"in": 1}), "swarmq.r.in"),
    ]:
        with pytest.raises(SwarmqError, match=f"already up on this broker: {queue} has a consumer"):
            await check_run_is_down(twin, "r", trained_beside_standby=("main",), report=print)


async def test_a_reader_that_died_with_a_private_broker_is_waited_for_visibly_and_not_for_ever():
    broker, told = MemoryBroker(), list[str]()
    await broker.declare("r", policies=["main"], kinds=["default"])
    async with broker.consume(topology.inbox("r"), prefetch=1):
        with pytest.raises(SwarmqError, match="run 'r' is already up on this broker"):
            await check_run_is_down(broker, "r", forget_s=0.05, report=told.append, check_s=0.01)
        waiting = asyncio.create_task(check_run_is_down(broker, "r", forget_s=600, report=told.append, check_s=0.01))
        while len(told) < 2:  # noqa: ASYNC110 - a list tells nobody
            await asyncio.sleep(0.01)
        assert not waiting.done()
    await waiting
    said = "broker: waiting for consumers of the previous start to leave swarmq.r.in (up to"
    assert told == [f"{said} 0 s)", f"{said} 600 s)"]
