"""An operator's command travels to the collector and the learners and back, on a broker in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from swarmq.broker import topology
from swarmq.client.data.tasks import strip_queue_id
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError, SwarmqError, TaskError
from swarmq.messages import Control, Event
from swarmq.observe.control_requests import describe_answer, send_command, send_eval_tasks
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
                changes = [{"path": one.path, "value": one.value, "from_step": 4} for one in state.changes]
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
        answer = await send_command(broker, "r", "set", {"policies.main.train.learning_rate": 1e-5})
        assert describe_answer(answer) == [
            "policies.main.train.learning_rate: 1e-06 -> 1e-05",
            "main: policies.main.train.learning_rate from step 4 on",
        ]
        again = await send_command(broker, "r", "set", {"policies.main.train.learning_rate": 1e-5})
        assert describe_answer(again)[0] == "nothing to change: the run has these settings already"
        assert describe_answer(await send_command(broker, "r", "pause"))[:1] == ["the run is paused"]
        band = await send_command(broker, "r", "set", {"policies.main.train.ratio_band": [0.5, 2.0]})
        assert describe_answer(band)[0] == "policies.main.train.ratio_band: not set -> [0.5, 2.0]"


@pytest.mark.parametrize(("after", "last"), [(2, 3), (200, 200)])
async def test_the_answer_to_a_stop_says_after_which_step(after, last):
    async with run() as broker:
        answer = await send_command(broker, "r", "stop", {"main": after})
        assert describe_answer(answer) == [
            f"main: ends after step {last}, with a checkpoint; `swarmq up` then prints how to continue"
        ]


async def test_a_refusal_is_raised_with_its_reason():
    async with run() as broker:
        with pytest.raises(ConfigError, match=r"policies\.main\.model: cannot change while the run is up"):
            await send_command(broker, "r", "set", {"policies.main.model": "other"})


async def test_a_learner_that_is_down_is_named_and_obeys_later():
    async with run(learner=False) as broker:
        answer = await send_command(broker, "r", "checkpoint", patience_s=3)  # for the collector, on a busy machine
        assert answer.missing == ("main",)
        assert "it executes the command when it is up" in describe_answer(answer)[-1]
        assert len(broker.stored(topology.control("r", "main"))) == 1


async def test_without_a_collector_the_command_waits_in_its_queue():
    broker = MemoryBroker()
    await broker.declare("r", policies=[], kinds=[])
    with pytest.raises(SwarmqError, match="has not answered"):
        await send_command(broker, "r", "pause", patience_s=0.1)
    assert len(broker.stored(topology.control("r"))) == 1


async def test_who_waits_for_an_answer_is_told_once_where_the_command_is():
    broker, told = MemoryBroker(), list[str]()
    await broker.declare("r", policies=[], kinds=[])
    with pytest.raises(SwarmqError, match="has not answered"):
        await send_command(broker, "r", "pause", patience_s=0.5, repeat_s=0.01, say=told.append)
    (line,) = told
    assert f"the command waits in the queue {topology.control('r')}; processes that start later execute it, too" in line


async def test_what_is_no_command_is_parked():
    async with run() as broker:
        await broker.publish(topology.control("r"), Event(run="r", source="x", name="state", at=0.0))
        await send_command(broker, "r", "resume")
        assert len(broker.stored(topology.DEAD)) == 1


async def test_eval_tasks_become_rounds_and_brought_again_replace_themselves():
    job = SwarmJob.build({"run": "r", "policies": {"main": {"model": "m"}}, "eval": {"every": 5}})
    store, broker, stop = Store(None, run="r"), MemoryBroker(), asyncio.Event()
    await broker.declare("r", policies=["main"], kinds=job.mix)
    tasks = [{"id": str(number), "n": number} for number in range(3)]
    assert await send_eval_tasks(broker, job, tasks, "default", repeats=1, source="aa") == 3
    assert await send_eval_tasks(broker, job, tasks[:2], "default", repeats=2, source="aa") == 2
    assert await send_eval_tasks(broker, job, tasks[:1], "default", repeats=1, source="bb") == 1
    async with asyncio.TaskGroup() as parts:
        parts.create_task(Collector(job, broker, store).run(stop))
        async with broker.consume(topology.evals("r", "default"), prefetch=99) as deliveries:
            round_of = [(await anext(deliveries)).message for _ in range(6)]
        stop.set()
    attempts = Counter(task.slot.task_id for task in round_of)
    assert attempts == {"default@aa:0": 2, "default@aa:1": 2, "default@aa:2": 1, "default@bb:0": 1}
    assert {(task.mode, task.slot.epoch) for task in round_of} == {("eval", 0)}
    assert {strip_queue_id(task.slot.task_id, "default") for task in round_of} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ([{"id": "a"}, {"id": "a"}], "'a' occurs more than once"),
        ([{"id": "a"}, {"id": "b", "kind": "code"}], "'b' is of kind 'code' by its own field"),
        ([{"id": "a"}, {"id": "b", "n": 2**70}], "'b': its data cannot be sent"),
    ],
)
async def test_one_bad_eval_task_brings_none(tasks, says):
    broker = MemoryBroker()
    await broker.declare("r", policies=[], kinds=[])
    with pytest.raises(TaskError, match=says):
        await send_eval_tasks(broker, JOB, tasks, "default", repeats=1)
    assert broker.stored(topology.control("r")) == []
