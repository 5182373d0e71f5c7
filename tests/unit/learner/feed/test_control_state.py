"""What an operator asks of a learner: in effect from the next batch on, in the batch log, and not forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.episodes import make_group
from swarmq.broker import Deliveries, topology
from swarmq.learner.store import records
from swarmq.messages import Change, Control
from swarmq.testing import MemoryBroker
from unit.learner.feed.test_process import READY, broker_with, desk, logged, stopped

RATE = "policies.main.train.learning_rate"
CONTROL = topology.control("r", "main")


def faster(number: int = 1, rate: float = 1e-3, **fields: object) -> Control:
    change = Change(number=number, path=RATE, before=1e-6, value=rate, base=1e-6)
    return Control(run="r", number=number, changes=(change,), command_id=f"c{number}", **fields)  # type: ignore[arg-type]


class SlowControl(MemoryBroker):
    """Its control queue is read once `control_is_read` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.control_is_read = asyncio.Event()
        self.control_is_read.set()

    @asynccontextmanager
    async def consume(self, queue: str, *, prefetch: int) -> AsyncIterator[Deliveries]:
        if queue == CONTROL:
            await self.control_is_read.wait()
        async with super().consume(queue, prefetch=prefetch) as consumer:
            yield consumer


async def answered(broker: MemoryBroker, number: int) -> dict:
    """The learner's word on a control state."""
    async with broker.events("r") as events:
        for event in broker.emitted:
            if event.name == "control" and event.fields["number"] == number:
                return event.fields
        async for event in events:
            if event.name == "control" and event.fields["number"] == number:
                return event.fields
    raise AssertionError


async def test_a_setting_holds_from_the_next_batch_on_and_stands_in_the_batch_log(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"), make_group("b"))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        await broker.publish(CONTROL, faster())
        fields = await answered(broker, 1)
        assert fields["changes"] == [{"path": RATE, "before": 1e-6, "value": 1e-3, "from_step": 2}]
        await trainer.send(records.StepDone(version=1))
        await trainer.batch()
    first, second = logged(tmp_path)
    assert (first.settings.learning_rate, first.index.control) == (1e-6, 0)
    assert (second.settings.learning_rate, second.index.control) == (1e-3, 1)


async def test_a_learner_that_starts_again_remembers_what_was_set_and_older_orders_change_nothing(
    tmp_path: Path,
) -> None:
    broker = await broker_with(make_group("a"))
    async with desk(tmp_path, broker):
        await broker.publish(CONTROL, faster(3))
        await answered(broker, 3)
    broker.emitted.clear()
    async with desk(tmp_path, broker) as trainer:
        await broker.publish(CONTROL, faster(2, rate=5.0))
        record, _ = await trainer.batch()
        assert record.settings.learning_rate == 1e-3


async def test_replay_repeats_the_settings_a_batch_was_logged_with(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"), make_group("b"))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()  # dies with it in its hands
    await broker.publish(CONTROL, faster())
    async with desk(tmp_path, broker) as trainer:
        await answered(broker, 1)
        record, replayed = await trainer.batch()
        assert (replayed, record.settings.learning_rate) == (True, 1e-6)
        await trainer.send(records.StepDone(version=1))
        record, replayed = await trainer.batch()
        assert (replayed, record.settings.learning_rate) == (False, 1e-3)


async def test_a_paused_learner_takes_no_batch_until_it_is_resumed(tmp_path: Path) -> None:
    broker = await broker_with()
    async with desk(tmp_path, broker) as trainer:
        await broker.publish(CONTROL, Control(run="r", number=1, pace="paused", command_id="p"))
        await answered(broker, 1)
        for episode in make_group("a"):
            await broker.publish(READY, episode)
        await trainer.send(records.RequestBatch())
        assert isinstance(await trainer.receive(), records.QueueEmpty)
        await broker.publish(CONTROL, Control(run="r", number=2, pace="running", command_id="q"))
        assert isinstance(await trainer.receive(), records.BatchReady)


async def test_a_checkpoint_that_was_asked_for_is_written_once(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"))
    async with desk(tmp_path, broker) as trainer:
        await broker.publish(CONTROL, Control(run="r", number=1, checkpoints=1, command_id="c1"))
        while not trainer.desk.control.checkpoint_due:
            await trainer.send(records.PhaseChange(phase="waiting"))
            async with broker.events("r") as events:
                await anext(events)
        await trainer.send(records.RequestBatch())
        assert await trainer.receive() == records.SaveCheckpoint(asked=1)
        await trainer.send(records.CheckpointSaved(oldest=0, asked=1))
        assert (await answered(broker, 1))["checkpoint"] == 0
        await trainer.batch()
    async with desk(tmp_path, broker) as trainer:
        await broker.publish(CONTROL, Control(run="r", number=1, checkpoints=1, command_id="c1"))
        _, replayed = await trainer.batch()
        assert replayed, "no second checkpoint"


async def test_a_learner_halts_after_the_step_that_was_named(tmp_path: Path) -> None:
    change = Change(number=1, path="policies.main.train.max_steps", before=0, value=1, base=0)
    broker = await broker_with(make_group("a"), make_group("b"))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        await broker.publish(CONTROL, Control(run="r", number=1, changes=(change,), command_id="c1"))
        await answered(broker, 1)
        await trainer.send(records.StepDone(version=1))
        await trainer.send(records.RequestBatch())
        assert isinstance(await trainer.receive(), records.TrainingDone)
        await stopped(trainer)
    assert len(logged(tmp_path)) == 1


async def test_a_learner_that_was_stopped_and_resumed_while_it_was_away_trains_on(tmp_path: Path) -> None:
    change = Change(number=1, path="policies.main.train.max_steps", before=0, value=1, base=0)
    broker = SlowControl()
    await broker.declare("r", policies=["main"], kinds=["default"])
    for episode in (*make_group("a"), *make_group("b")):
        await broker.publish(READY, episode)
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        await broker.publish(CONTROL, Control(run="r", number=1, changes=(change,), command_id="c1"))
        await answered(broker, 1)
        await trainer.send(records.StepDone(version=1))
        await stopped(trainer)
    assert [event.fields["phase"] for event in broker.emitted if event.name == "state"][-1] == "ended"
    await broker.publish(CONTROL, Control(run="r", number=2, command_id="c2"))
    broker.control_is_read.clear()
    async with desk(tmp_path, broker, version=1) as trainer:
        await trainer.send(records.RequestBatch())
        assert isinstance(await trainer.receive(), records.QueueEmpty), "its order on disk is no longer the newest"
        broker.control_is_read.set()
        assert isinstance(await trainer.receive(), records.BatchReady)


async def test_what_is_no_control_state_is_parked(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"))
    await broker.publish(CONTROL, make_group("x")[0])
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        while not broker.stored(topology.DEAD):
            async with broker.events("r") as events:
                await anext(events)
