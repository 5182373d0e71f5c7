"""The batch feeder against a broker in memory: what is logged, acknowledged, handed over and reported, in which order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.episodes import make_episode, make_group
from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.errors import LearnerError
from swarmq.event_fields import undescribed
from swarmq.learner.feed import frames, process
from swarmq.learner.feed.batcher import BatchLimits
from swarmq.learner.feed.process import BatchFeeder, FeederIntervals
from swarmq.learner.store import batch_log, records
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.store.records import BatchRecord, Hello, decode_record
from swarmq.learner.store.report_offsets import ReportOffsets
from swarmq.learner.store.writer_lock import hold_lock
from swarmq.messages import Change, Control, Evaluation, Rollout, StepReport, Ticket, decode
from swarmq.testing import MemoryBroker

READY = topology.ready("r", "main")


def job(folder: Path, **train: object) -> SwarmJob:
    return SwarmJob.build(
        {
            "run": "r",
            "folder": str(folder),
            "groups": {"group_size": 2, "groups_per_batch": 1},
            "policies": {"main": {"model": "m", "train": train}},
        }
    )


class Trainer:
    """The other end of the socket."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        desk: BatchFeeder,
        running: asyncio.Future[None],
    ) -> None:
        self.reader, self.writer, self.desk, self.running = reader, writer, desk, running

    async def send(self, message: records.ToIO) -> None:
        body = frames._encoder.encode(message)
        self.writer.write(frames.LENGTH.pack(len(body)) + body)
        await self.writer.drain()

    async def receive(self) -> records.ToTrainer:
        (size,) = frames.LENGTH.unpack(await self.reader.readexactly(8))
        return frames._to_trainer.decode(await self.reader.readexactly(size))

    async def batch(self) -> tuple[BatchRecord, bool]:
        await self.send(records.RequestBatch())
        while not isinstance(message := await self.receive(), records.BatchReady):
            assert isinstance(message, records.QueueEmpty)
        return decode_record(message.record), message.replayed


@asynccontextmanager
async def desk(
    folder: Path,
    broker: MemoryBroker,
    *,
    version: int = 0,
    intervals: FeederIntervals = process.INTERVALS,
    demonstrations: tuple[Rollout, ...] = (),
    **train: object,
) -> AsyncIterator[Trainer]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    their_reader, their_writer = await asyncio.open_connection(sock=theirs)
    the_job = job(folder, **train)
    hello = Hello(job=the_job, policy="main", version=version, vocab_size=128, demonstrations=demonstrations)
    try:
        the_desk = BatchFeeder(hello, the_job.run_folder.batch_log("main"), broker, their_writer, intervals=intervals)
        running = asyncio.ensure_future(the_desk.run(lambda: frames.read(their_reader)))
        try:
            yield Trainer(reader, writer, the_desk, running)
        finally:
            writer.close()
            try:
                await running
            except* EOFError:
                pass
        assert set().union(*map(undescribed, broker.emitted)) == set()
    finally:
        for each in (writer, their_writer):
            each.close()
            with contextlib.suppress(ConnectionError):
                await each.wait_closed()


async def broker_with(*groups: list) -> MemoryBroker:
    broker = MemoryBroker()
    await broker.declare("r", policies=["main"], kinds=["default"])
    for group in groups:
        for episode in group:
            await broker.publish(READY, episode)
    return broker


def unacked(broker: MemoryBroker) -> int:
    queue = broker._queue(READY)
    return len(queue.waiting) + sum(len(consumer._session.held) for consumer in queue.consumers)


def consumed(broker: MemoryBroker) -> list[StepReport]:
    messages = [decode(stored.body) for stored in broker.stored(topology.inbox("r"))]
    return [message for message in messages if isinstance(message, StepReport)]


def logged(folder: Path) -> list[BatchRecord]:
    return list(batch_log.read_records(job(folder).run_folder.batch_log("main")))


async def stopped(trainer: Trainer) -> None:
    await trainer.send(records.Stop())
    while not isinstance(await trainer.receive(), records.Stopped):
        pass


async def test_a_batch_is_logged_then_acknowledged_then_handed_over_then_reported(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"), make_group("b", (1.0, 1.0)), make_group("c"))
    async with desk(tmp_path, broker) as trainer:
        record, replayed = await trainer.batch()
        assert not replayed
        assert logged(tmp_path)[0] == record
        assert record.index.trained == ("a-0", "a-1")
        assert [(code.kind, code.name) for code in record.methods] == [
            ("loss", "tis_mask"),
            ("advantage", "rloo"),
            ("grouping", "slot"),
            ("schedule", "constant"),
            ("optimizer", "adamw"),
        ]
        assert unacked(broker) <= 4
        assert not [c for c in consumed(broker) if c.trained], "not trained yet"
        await trainer.send(records.StepDone(version=1, fields={"loss": 0.5, "tokens_computed": 10}))
        record, _ = await trainer.batch()
        assert (record.index.version, record.index.trained) == (2, ("c-0", "c-1"))
        await trainer.send(records.StepDone(version=2))
        await stopped(trainer)
    assert unacked(broker) == 0
    told = {i: c for c in consumed(broker) for i in (*c.trained, *c.dropped)}
    assert set(told) == {"a-0", "a-1", "b-0", "b-1", "c-0", "c-1"}
    assert told["b-0"].dropped == {"b-0": "equal_rewards", "b-1": "equal_rewards"}
    assert (told["a-0"].version, told["c-0"].version) == (1, 2)
    steps = [event.fields for event in broker.emitted if event.name == "step"]
    assert [s["version"] for s in steps] == [1, 2]
    assert steps[0]["loss"] == 0.5
    assert sum(s["equal_groups"] for s in steps) == 0.5
    assert {"reward", "reward_by_kind", "staleness", "tokens_sampled", "truncated"} <= steps[0].keys()


async def test_drops_are_reported_at_once_because_their_tickets_are_needed_for_the_batch(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a", (1.0, 1.0)))
    async with desk(tmp_path, broker) as trainer, broker.consume(topology.inbox("r"), prefetch=1) as inbox:
        await trainer.send(records.RequestBatch())
        message = (await anext(inbox)).message
        assert isinstance(message, StepReport)
        assert (message.version, message.record, set(message.dropped)) == (0, 1, {"a-0", "a-1"})
        assert unacked(broker) == 0


async def test_why_episodes_cannot_be_trained_is_said_in_words_where_people_look(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a", turns=0), make_group("b", turns=0))
    async with desk(tmp_path, broker) as trainer, broker.consume(topology.inbox("r"), prefetch=1) as inbox:
        await trainer.send(records.RequestBatch())
        await anext(inbox)
        await stopped(trainer)
    warnings = [event.fields["text"] for event in broker.emitted if event.name == "warning"]
    assert warnings == [
        "learner main: dropped as no_turns: a-0 made no model call; further drops for this reason are only counted"
    ]


@pytest.mark.parametrize("replayed", [False, True])
async def test_signs_that_the_training_goes_wrong_are_said_where_people_look(tmp_path: Path, replayed: bool) -> None:
    """Those of replayed steps were said when the steps were new."""
    broker = await broker_with(make_group("a"))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        await trainer.send(records.StepDone(version=1, fields={"kl_k3": 2.0, "replayed": replayed}))
        await stopped(trainer)
    warnings = [event.fields["text"] for event in broker.emitted if event.name == "warning"]
    assert [text.split(":")[0] for text in warnings] == ([] if replayed else ["step 1"])
    assert replayed or "broken mismatch: kl_k3 of engine and learner 2 (broken above 0.5)" in warnings[0]


async def test_what_was_logged_and_not_trained_is_replayed_before_anything_new(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"), make_group("b"), make_group("c"))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        await trainer.send(records.StepDone(version=1))
        await trainer.batch()  # the trainer dies with version 2 in its hands, its newest checkpoint is of version 0
    async with desk(tmp_path, broker) as trainer:
        again = [await trainer.batch() for _ in range(2)]
        assert [(r.index.trained[0], replayed) for r, replayed in again] == [("a-0", True), ("b-0", True)]
        record, replayed = await trainer.batch()
        assert (record.index.trained[0], replayed) == ("c-0", False)


async def test_a_batch_that_the_trainer_had_in_its_hands_is_not_replayed_to_it(tmp_path: Path) -> None:
    """A batch feeder died after it had handed the batch over, and the trainer told its successor of the weights before."""
    broker = await broker_with(make_group("a"), make_group("b"))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
    async with desk(tmp_path, broker, version=0) as trainer:
        await trainer.send(records.StepDone(version=1))
        record, replayed = await trainer.batch()
        assert (record.index.trained[0], replayed) == ("b-0", False)


async def test_what_is_dropped_while_the_past_is_replayed_does_not_turn_the_next_step_back(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"), make_group("b"))
    async with desk(tmp_path, broker) as trainer:
        for version in (1, 2):
            await trainer.batch()
            await trainer.send(records.StepDone(version=version))
        await stopped(trainer)
    async with desk(tmp_path, broker) as trainer, broker.consume(topology.inbox("r"), prefetch=3) as inbox:
        await trainer.batch()
        for episode in make_group("equal", (1.0, 1.0)):
            await broker.publish(READY, episode)
        for _ in range(3):
            await anext(inbox)
        assert [record.index.version for record in logged(tmp_path)] == [1, 2, 0]
        assert trainer.desk.next_step == 3


async def test_a_report_that_was_not_confirmed_is_made_after_a_restart(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()  # trained and checkpointed as version 1, but killed before it was told
    async with desk(tmp_path, broker, version=1) as trainer:
        await stopped(trainer)
    assert [c.trained for c in consumed(broker)] == [("a-0", "a-1")]
    async with desk(tmp_path, broker, version=1) as trainer:
        await stopped(trainer)
    assert len(consumed(broker)) == 1, "told twice"


def evaluation(version: int) -> Evaluation:
    return Evaluation(run="r", version=version, began_at=float(version), results={"version": version, "kinds": {}})


async def evaluations(trainer: Trainer, number: int) -> list[int]:
    """Versions of the results that a trainer is offered and logs."""
    versions = []
    async with asyncio.timeout(60):
        while len(versions) < number:
            if isinstance(message := await trainer.receive(), records.EvaluationReady):
                versions.append(message.evaluation.version)
                await trainer.send(records.EvaluationLogged(began_at=message.evaluation.began_at))
    return versions


async def test_results_of_evaluations_reach_a_trainer_once_however_often_it_restarts(tmp_path: Path) -> None:
    broker, queue = await broker_with(), topology.control("r", "main")
    for version in (1, 2):
        await broker.publish(queue, evaluation(version))
    async with desk(tmp_path, broker) as trainer:
        assert isinstance(message := await trainer.receive(), records.EvaluationReady)
        assert message.evaluation == evaluation(1)
    assert not broker.stored(queue), "in a file of the learner: a redelivery limit cannot lose them"
    async with desk(tmp_path, broker) as trainer:
        assert await evaluations(trainer, 1) == [1], "again, because nobody said that it is logged"
    await broker.publish(queue, evaluation(1))
    await broker.publish(queue, evaluation(3))
    async with desk(tmp_path, broker) as trainer:
        assert await evaluations(trainer, 2) == [2, 3]
        await trainer.send(records.RequestBatch())
        assert isinstance(await trainer.receive(), records.QueueEmpty), "nothing else is offered"
        await stopped(trainer)


async def test_results_that_wait_when_training_is_over_come_before_the_end(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"))
    async with desk(tmp_path, broker, max_steps=1) as trainer:
        await trainer.batch()
        await trainer.send(records.StepDone(version=1))
        await stopped(trainer)
    await broker.publish(topology.control("r", "main"), evaluation(1))
    async with desk(tmp_path, broker, version=1, max_steps=1) as trainer:
        await trainer.send(records.RequestBatch())
        received = [await trainer.receive()]
        while not isinstance(received[-1], records.TrainingDone):
            received.append(await trainer.receive())
        assert [type(message) for message in received if not isinstance(message, records.QueueEmpty)] == [
            records.EvaluationReady,
            records.TrainingDone,
        ]
        await stopped(trainer)


async def test_a_lost_session_costs_nothing(tmp_path: Path) -> None:
    first, second = make_group("b")
    broker = await broker_with(make_group("a"), [first])
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        broker.interrupt()  # `first` waits in memory; it comes again
        await broker.publish(READY, second)
        await trainer.send(records.StepDone(version=1))
        record, _ = await trainer.batch()
        assert record.index.trained == ("b-0", "b-1")
        assert unacked(broker) == 0
    ids = [i for r in logged(tmp_path) for i in r.index.trained]
    assert ids == ["a-0", "a-1", "b-0", "b-1"]


async def test_a_desk_whose_place_was_taken_while_it_slept_logs_and_acknowledges_nothing(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"))

    async def work() -> None:
        async with desk(tmp_path, broker) as trainer:
            with hold_lock(job(tmp_path).run_folder.batch_log("main") / "lock"):
                await trainer.send(records.RequestBatch())
                await trainer.running

    with pytest.raises(ExceptionGroup) as ended:
        await work()
    (error,) = {str(leaf) for leaf in process._leaves(ended.value)}
    assert "was taken over by process" in error
    assert logged(tmp_path) == []
    assert unacked(broker) == 2


async def test_an_io_process_that_waits_for_its_broker_ends_with_its_trainer(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    waiting = asyncio.Event()

    @asynccontextmanager
    async def away(_: Hello) -> AsyncIterator[MemoryBroker]:
        waiting.set()
        await asyncio.Event().wait()
        yield MemoryBroker()

    running = asyncio.create_task(process._run(theirs, away, BatchFeeder))
    frames.send(ours, Hello(job=job(tmp_path), policy="main", version=0, vocab_size=128, again=True))
    await waiting.wait()
    ours.close()
    await running


async def test_what_is_no_episode_of_ours_is_parked(tmp_path: Path) -> None:
    broker = await broker_with([Ticket(run="r", ticket_id="t", kind="default")], make_group("a"))
    broker.put(READY, b"garbage")
    async with desk(tmp_path, broker) as trainer:
        record, _ = await trainer.batch()
    assert record.index.trained == ("a-0", "a-1")
    assert len(broker.stored(topology.DEAD)) == 2


async def test_old_batches_go_only_when_no_kept_checkpoint_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(batch_log.BatchLog.__init__.__kwdefaults__, "segment_bytes", 1)
    monkeypatch.setattr(BatchLimits, "num_known", 2)
    broker = await broker_with(*(make_group(name) for name in "abc"))
    async with desk(tmp_path, broker, keep_batches=False) as trainer:
        for version in (1, 2, 3):
            await trainer.batch()
            await trainer.send(records.StepDone(version=version))
        async with broker.consume(topology.inbox("r"), prefetch=9) as reports:
            for _ in range(3):  # before they are reported, none may go
                await anext(reports)
        await trainer.send(records.CheckpointSaved(oldest=2))
        await stopped(trainer)
    assert [r.index.version for r in logged(tmp_path)] == [3]


async def test_a_trainer_that_waits_for_data_ends_when_it_is_told_that_its_last_step_was_the_last(
    tmp_path: Path,
) -> None:
    broker = await broker_with(make_group("a", (0.0, 1.0)))
    async with desk(tmp_path, broker) as trainer:
        await trainer.batch()
        await trainer.send(records.StepDone(version=1))
        await trainer.send(records.RequestBatch())
        assert isinstance(await trainer.receive(), records.QueueEmpty)
        last = Change(number=1, path="policies.main.train.max_steps", before=0, value=1, base=0)
        await broker.publish(topology.control("r", "main"), Control(run="r", number=1, changes=(last,)))
        assert isinstance(await trainer.receive(), records.TrainingDone)


async def test_a_log_that_does_not_fit_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="the checkpoint is of version 7"):
        async with desk(tmp_path, await broker_with(), version=7):
            pass


async def test_waiting_too_long_is_said_with_what_is_missing(tmp_path: Path) -> None:
    broker = await broker_with([make_episode("a", 0)])
    async with desk(tmp_path, broker, intervals=FeederIntervals(state_s=0.0, stuck_s=-1.0)) as trainer:
        await trainer.send(records.RequestBatch())
        async with broker.events("r") as events:
            async for event in events:
                if event.name == "warning" and "1 group begun" in event.fields["text"]:
                    assert "1 of default missing" in event.fields["text"]
                    assert event.fields["kind"] == "stall"
                    break


async def test_waiting_while_nothing_comes_tells_reports_again_and_asks_for_what_is_not_reported(
    tmp_path: Path,
) -> None:
    half, other = make_group("b")
    broker = await broker_with(make_group("a"), [half])
    async with desk(tmp_path, broker) as trainer, broker.consume(topology.inbox("r"), prefetch=9) as inbox:
        await trainer.batch()
        await trainer.send(records.StepDone(version=1))
        delivery = await anext(inbox)
        await delivery.ack()
        report = delivery.message
        await stopped(trainer)
    impatient = FeederIntervals(state_s=0.0, ask_s=0.0)
    async with (
        desk(tmp_path, broker, version=1, intervals=impatient) as trainer,
        broker.consume(topology.inbox("r"), prefetch=9) as inbox,
    ):
        await trainer.send(records.RequestBatch())
        assert [(await anext(inbox)).message for _ in range(2)] == [
            report,
            StepReport(run="r", policy="main", version=1, trained=()),
        ]
        for episode in (half, other):  # as the collector answers
            await broker.publish(READY, episode)
        while not isinstance(message := await trainer.receive(), records.BatchReady):
            assert isinstance(message, records.QueueEmpty)
        assert decode_record(message.record).index.trained == ("b-0", "b-1")
        assert unacked(broker) == 0


async def test_a_report_waits_for_an_inbox_that_was_deleted(tmp_path: Path) -> None:
    broker = await broker_with(make_group("a"))
    async with desk(tmp_path, broker, intervals=FeederIntervals(retry_s=0.0)) as trainer, broker.events("r") as events:
        await trainer.batch()
        broker.delete(topology.inbox("r"))
        await trainer.send(records.StepDone(version=1))
        await anext(event async for event in events if event.name == "warning" and "waits" in event.fields["text"])
        await broker.declare("r", policies=["main"], kinds=["default"])
        await stopped(trainer)
    assert [c.trained for c in consumed(broker)] == [("a-0", "a-1")]


def test_the_io_process_never_loads_torch() -> None:
    import subprocess
    import sys

    code = "import sys, swarmq.learner.feed.process; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_full_disk_is_waited_for_visibly_and_the_batch_is_trained_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, confirm = batch_log.BatchLog.append, ReportOffsets.confirm
    full = True

    def refusing(work: Callable[..., None]) -> Callable[..., None]:
        def refused(*given: object) -> None:
            with map_os_errors(tmp_path):
                if full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            work(*given)

        return refused

    monkeypatch.setattr(batch_log.BatchLog, "append", refusing(append))
    monkeypatch.setattr(ReportOffsets, "confirm", refusing(confirm))
    broker = await broker_with(make_group("a"))
    async with desk(tmp_path, broker, intervals=FeederIntervals(retry_s=0.0)) as trainer, broker.events("r") as events:
        await trainer.send(records.RequestBatch())
        warning = await anext(event async for event in events if event.name == "warning")
        assert "No space left on device: free space there" in warning.fields["text"]
        assert (unacked(broker), logged(tmp_path)) == (2, [])
        full = False
        while not isinstance(message := await trainer.receive(), records.BatchReady):
            assert isinstance(message, records.QueueEmpty)
        record = decode_record(message.record)
        assert record.index.trained == ("a-0", "a-1")
        assert (unacked(broker), logged(tmp_path)) == (0, [record])
        full = True
        await trainer.send(records.StepDone(version=1))
        await stopped(trainer)
    assert [c.trained for c in consumed(broker)] == [("a-0", "a-1")], "told, although the number told could not be kept"


async def test_acknowledging_before_the_log_loses_episodes_and_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: with the two swapped, a disk that is full at the wrong moment costs a group."""

    async def acknowledge_first(self: BatchFeeder, record: BatchRecord) -> None:
        for episode_id in record.index.trained:
            await self.unacked.pop(episode_id).ack()
        self.log.append(record)

    def full(_: object, __: BatchRecord) -> None:
        tried.set()
        raise LearnerError("no space left")

    left, tried = {}, asyncio.Event()
    for order in (BatchFeeder._commit, acknowledge_first):
        monkeypatch.setattr(BatchFeeder, "_commit", order)
        monkeypatch.setattr(batch_log.BatchLog, "append", full)
        broker = await broker_with(make_group("a"))
        try:
            async with desk(tmp_path / order.__name__, broker) as trainer:
                await trainer.send(records.RequestBatch())
                await tried.wait()
        except* LearnerError:
            tried.clear()
        left[order.__name__] = unacked(broker)
    assert left == {"_commit": 2, "acknowledge_first": 0}


async def test_the_log_has_the_demonstrations_that_seed_and_step_draw(tmp_path: Path) -> None:
    shown = tuple(make_episode(f"line {number}") for number in range(20))
    sft = {"demonstrations": "chats.jsonl", "share": 1.25}
    drawn = []
    for folder in ("one", "two"):
        broker = await broker_with(make_group("a"), make_group("b"))
        async with desk(tmp_path / folder, broker, sft=sft, demonstrations=shown) as trainer:
            for version in (1, 2):
                record, _ = await trainer.batch()
                await trainer.send(records.StepDone(version=version))
                drawn.append(record.demonstrations)
        assert [record.demonstrations for record in logged(tmp_path / folder)] == drawn[-2:]
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    assert all(len({one.episode_id for one in each}) == 3 for each in drawn), "5 / 4 of two episodes, rounded up"
