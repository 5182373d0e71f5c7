"""An operator's command travels to the collector and the learners and back, on a broker in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from swarmq.broker import topology
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError, SwarmqError
from swarmq.messages import Control, Event
from swarmq.observe.operate import ask, lines
from swarmq.testing import MemoryBroker

JOB = SwarmJob.build({"run": "r", "policies": {"main": {"model": "m"}}, "groups": {"max_staleness": 0}})


@contextlib.asynccontextmanager
async def run(*, learner: bool = True) -> AsyncIterator[MemoryBroker]:
    """A collector, and a learner that obeys."""
    broker, stop = MemoryBroker(), asyncio.Event()
    await broker.declare("r", policies=["main"], kinds=JOB.mix)

    async def obey() -> None:
        async with broker.consume(topology.control("r", "main"), prefetch=9) as deliveries:
            async for delivery in deliveries:
                state = delivery.message
                assert isinstance(state, Control)
                changes = [{"path": change.path, "from_step": 4} for change in state.changes]
                fields = {"state": "applied", "command_id": state.command_id, "policy": "main", "changes": changes}
                await delivery.ack()
                await broker.emit(
                    Event(run="r", source="learner.main", name="control", at=0.0, fields=fields | {"from_step": 4})
                )

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Collector(JOB, broker, Store(None, run="r")).run(stop))
        obeying = tasks.create_task(obey()) if learner else None
        yield broker
        stop.set()
        if obeying:
            obeying.cancel()


async def test_the_answer_says_what_changed_and_from_which_step():
    async with run() as broker:
        answer = await ask(broker, "r", "set", {"policies.main.train.learning_rate": 1e-5})
        assert lines(answer) == [
            "policies.main.train.learning_rate: 1e-06 -> 1e-05",
            "main: policies.main.train.learning_rate from step 4 on",
        ]
        again = await ask(broker, "r", "set", {"policies.main.train.learning_rate": 1e-5})
        assert lines(again)[0] == "nothing to change: the run has these settings already"
        assert lines(await ask(broker, "r", "pause"))[:1] == ["the run is paused"]


async def test_a_refusal_is_raised_with_its_reason():
    async with run() as broker:
        with pytest.raises(ConfigError, match=r"policies\.main\.model: cannot change while the run is up"):
            await ask(broker, "r", "set", {"policies.main.model": "other"})


async def test_a_learner_that_is_down_is_named_and_obeys_later():
    async with run(learner=False) as broker:
        answer = await ask(broker, "r", "checkpoint", patience_s=0.5)
        assert answer.missing == ("main",)
        assert "will obey when it is up" in lines(answer)[-1]
        assert len(broker.stored(topology.control("r", "main"))) == 1


async def test_without_a_collector_the_command_waits_in_its_queue():
    broker = MemoryBroker()
    await broker.declare("r", policies=[], kinds=[])
    with pytest.raises(SwarmqError, match="has not answered"):
        await ask(broker, "r", "pause", patience_s=0.1)
    assert len(broker.stored(topology.control("r"))) == 1


async def test_what_is_no_command_is_parked():
    async with run() as broker:
        await broker.publish(topology.control("r"), Event(run="r", source="x", name="state", at=0.0))
        await ask(broker, "r", "resume")
        assert len(broker.stored(topology.DEAD)) == 1
