"""Collector, batch log and checkpoints together, against a model of the queues between them.

    client ──> inbox ──> collector (core, store) ──> ready ──> learner (intake, log, checkpoints) ──> inbox

Hypothesis chooses who does what next, and after which of their effects they die. The parts are the real ones; the
model knows which episodes were confirmed, holds the messages as a broker would, and says what the weights must be:
a digest that every trained batch goes into, so that a batch that is trained twice, left out or out of order shows.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import Rules
from swarmq.collector.service import build_rollout
from swarmq.collector.store import Store
from swarmq.config import Train
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.feed.batcher import WINDOWS_KNOWN, Batcher, BatchLimits
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import BatchRecord, RunIdentity
from swarmq.learner.store.report_offsets import ReportOffsets
from swarmq.messages import Message, Rollout, StepReport, VersionSpan, decode, encode
from unit.collector import conftest as say

pytestmark = pytest.mark.slow

GROUP_SIZE = 2
OURS = RunIdentity(run=say.RUN, policy="main", model="m")
RULES = Rules(
    run=say.RUN,
    trained=("main",),
    known=("main",),
    mix={"math": 1.0},
    group_size=GROUP_SIZE,
    groups_per_batch=1,
    deadline_s=100.0,
    max_staleness=1,
    idle_timeout_s=300.0,
)
SPARE = WINDOWS_KNOWN * (RULES.max_staleness + 1) * RULES.groups_per_batch * GROUP_SIZE
START = b"the initial weights"


class Queue:
    """A queue of a broker with one consumer: what it was handed is kept until it acknowledges or dies."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.handed: list[bytes] = []

    def put(self, message: Message) -> None:
        self.waiting.append(encode(message))

    def hand(self, num: int) -> list[bytes]:
        taken = [self.waiting.popleft() for _ in range(min(num, len(self.waiting)))]
        self.handed += taken
        return taken

    def redeliver(self) -> None:
        self.waiting.extendleft(reversed(self.handed))
        self.handed.clear()


class Digester:
    """Stands where a trainer does: its weights are a digest of all that it was trained on."""

    def __init__(self) -> None:
        self.version, self.weights = 0, START
        PartialState()  # accelerate's log wants one
        self.accelerator, self.optimizer = Ranks(), NoOptimizer()
        self.model = torch.nn.Module()

    def step(self, record: BatchRecord) -> None:
        self.version += 1
        assert record.index.version == self.version, "a batch was left out, or trained again"
        self.weights = trained_on(self.weights, record)

    def critic_state(self) -> None:
        return None

    def files(self, _: object) -> Digester:
        return copy.copy(self)

    def write(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(self.weights)


class Ranks:
    """One process, as accelerate would describe it."""

    is_main_process = True
    process_index = step = 0

    def wait_for_everyone(self) -> None:
        pass


class NoOptimizer:
    def state_dict(self) -> dict[str, object]:
        return {}


def trained_on(weights: bytes, record: BatchRecord) -> bytes:
    return hashlib.sha256(weights + "".join(record.index.trained).encode()).digest()


class Pipeline(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.disk = mock.patch("os.fsync")  # what is tested is the order of effects, not the disk
        self.disk.start()
        self.now, self.begun = 1000.0, 0
        self.wanted = [START]
        """Weights of every version."""
        self.slots: dict[str, tuple[str, int]] = {}
        """Episode -> task and repeat."""
        self.sampled: dict[str, int] = {}
        """Episode -> the weights that it was sampled with."""
        self.inbox, self.ready = Queue(), Queue()
        self.store = Store(None, run=say.RUN)
        self.start_collector()
        self.start_learner()

    def teardown(self) -> None:
        try:
            self.come_to_rest()
            self.reckon()
        finally:
            self.disk.stop()
            self.store.close()
            self.log.close()
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------------------------------------- clients

    @rule(task=st.integers(0, 9))
    def a_task_is_done(self, task: int) -> None:
        for repeat in range(GROUP_SIZE):
            self.an_episode_ends(task, repeat, reward=repeat, twice=False)

    @rule(task=st.integers(0, 9), repeat=st.integers(0, 1), reward=st.integers(0, 1), twice=st.booleans())
    def an_episode_ends(self, task: int, repeat: int, reward: int, twice: bool) -> None:
        """A first or a further attempt at a slot; confirmed, so never to be lost."""
        episode, self.begun = f"e{self.begun}", self.begun + 1
        self.slots[episode], self.sampled[episode] = (f"t{task}", repeat), self.trainer.version
        weights = (VersionSpan(version=self.trainer.version, start=0, end=1),)
        pieces = [
            say.begin(episode, f"t{task}", repeat, group_size=GROUP_SIZE),
            say.turn("a", episode, versions=weights),
            say.end(episode, reward=float(reward)),
        ]
        for piece in pieces * (1 + twice):
            self.inbox.put(piece)

    @rule(seconds=st.sampled_from([1.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # ----------------------------------------------------------------------------------------- collector

    def start_collector(self) -> None:
        self.core = Core(RULES, self.store, self.store.snapshot(), now=self.now)
        self.outgoing = deque(item for item in self.store.outbox() if isinstance(item, do.Forward))
        self.sent: list[do.Forward] = []

    @rule(
        num=st.integers(1, 30),
        dies=st.sampled_from([None, None, None, "in the transaction", "before the acknowledgement"]),
    )
    def collector_decides(self, num: int, dies: str | None) -> None:
        decided: list[do.Effect] = []
        try:
            with self.store.transaction():
                for effect in self._decisions(self.inbox.hand(num)):
                    self.store.write(effect)  # before the next decision, which may ask the store
                    decided.append(effect)
                if dies == "in the transaction":
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            self.collector_dies()
            return
        self.sent.clear()
        self.outgoing += [effect for effect in decided if isinstance(effect, do.Forward)]
        if dies:
            self.collector_dies()
        self.inbox.handed.clear()

    @precondition(lambda self: self.outgoing)
    @rule(num=st.integers(1, 9), dies=st.sampled_from([False, False, False, True]))
    def collector_publishes(self, num: int, dies: bool) -> None:
        for _ in range(min(num, len(self.outgoing))):
            item = self.outgoing.popleft()
            if episode := build_rollout(self.store, item):
                self.ready.put(episode)
            self.sent.append(item)
        if dies:
            self.collector_dies()

    def collector_dies(self) -> None:
        self.inbox.redeliver()
        self.start_collector()

    def _decisions(self, bodies: list[bytes]) -> Iterator[do.Effect]:
        for item in self.sent:
            yield from self.core.confirm_forward(item.episode_id, item.policy)
        for body in bodies:
            yield from self.core.take(decode(body), body, self.now)
        yield from self.core.tick(self.now)
        yield from self.core.settle()

    # ------------------------------------------------------------------------------------------- learner

    def start_learner(self) -> None:
        """The newest sound checkpoint, the log after it, then the queue."""
        self.trainer: Any = Digester()
        if found := discovery.find_newest(self.folder / "checkpoints", OURS):
            self.trainer.version = found.version
            self.trainer.weights = (found.path / "model.safetensors").read_bytes()
        self.log = BatchLog(self.folder / "log", OURS, segment_bytes=2000)
        self.reports = ReportOffsets(self.folder / "log" / "reported", self.log)
        limits = BatchLimits(groups_per_batch=1, mix=RULES.mix, max_staleness=RULES.max_staleness)
        self.intake = Batcher(limits, self.log.indices)
        for record in self.log.after(self.trainer.version):
            self.trainer.step(record)

    @rule(
        num=st.integers(1, 9),
        dies=st.sampled_from([None, None, None, "in the write", "before the acknowledgement", "before the report"]),
    )
    def learner_works(self, num: int, dies: str | None) -> None:
        self.take_in(self.ready.hand(num))
        record = self.intake.take(version=self.trainer.version, at=self.now, settings=Train()) or self.intake.drops(
            version=self.trainer.version, at=self.now
        )
        if record is None:
            return
        self.log.append(record)
        if dies == "in the write":
            self._tear()
        elif record.index.trained:
            self.wanted.append(trained_on(self.wanted[-1], record))
        if dies in {"in the write", "before the acknowledgement"}:
            self.learner_dies()
            return
        self.acknowledge({*record.index.trained, *record.index.dropped})
        if record.index.trained:
            self.trainer.step(record)
        if dies:
            self.learner_dies()
        else:
            self.report()

    @rule(dies=st.sampled_from([None, None, "in the draft"]), keep=st.integers(1, 2))
    def learner_saves(self, dies: str | None, keep: int) -> None:
        folder = self.folder / "checkpoints"
        if dies:
            (folder / f"{save_load.DRAFT}step-9").mkdir(parents=True, exist_ok=True)
            self.learner_dies()
        else:
            oldest = save_load.save_checkpoint(folder, self.trainer, OURS, model="", keep=keep)
            self.log.prune(oldest if keep == 1 else 0, reported=self.reports.through, spare=SPARE)

    @rule()
    def learner_dies(self) -> None:
        self.log.close()
        self.ready.redeliver()
        self.start_learner()

    @precondition(lambda self: len(list(self.folder.glob("checkpoints/step-*"))) > 1)
    @rule()
    def the_newest_checkpoint_is_damaged(self) -> None:
        newest = max(self.folder.glob("checkpoints/step-*"))
        (newest / "model.safetensors").write_bytes(b"rubbish")
        self.learner_dies()

    @rule(at=st.integers(0, 20))
    def a_finished_episode_comes_again(self, at: int) -> None:
        known = [*self.ready.waiting, *self.ready.handed]
        if known:
            self.ready.waiting.append(known[at % len(known)])

    def take_in(self, bodies: list[bytes]) -> None:
        for body in bodies:
            episode = decode(body)
            assert isinstance(episode, Rollout)
            if not self.intake.accept(episode):
                self.acknowledge({episode.episode_id})

    def acknowledge(self, episodes: set[str]) -> None:
        self.ready.handed = [body for body in self.ready.handed if _id(body) not in episodes]

    def report(self) -> None:
        for index in self.reports.due(self.trainer.version):
            self.inbox.put(
                StepReport(
                    run=say.RUN,
                    policy="main",
                    record=index.record,
                    version=index.version,
                    trained=index.trained,
                    dropped=index.dropped,
                )
            )
            self.reports.confirm(index.record)

    def _tear(self) -> None:
        """The process died in the middle of the last write."""
        place = self.log.places[-1]
        with place.segment.open("rb+") as segment:
            segment.truncate(place.offset + place.size // 2)

    @rule(num=st.integers(1, 9))
    def everybody_works(self, num: int) -> None:
        """Without this most runs would be over before a step is trained."""
        self.collector_decides(3 * num, None)
        self.collector_publishes(num, dies=False)
        self.learner_works(num, None)

    # -------------------------------------------------------------------------------------- what must hold

    @invariant()
    def the_weights_are_those_of_a_learner_that_never_died(self) -> None:
        assert (self.trainer.version, self.trainer.weights) == (len(self.wanted) - 1, self.wanted[-1])

    @invariant()
    def no_slot_is_trained_twice_and_no_episode_has_two_ends(self) -> None:
        indices = [place.index for place in self.log.places]
        slots = Counter(self.slots[episode] for index in indices for episode in index.trained)
        ends = Counter(episode for index in indices for episode in (*index.trained, *index.dropped))
        assert max((slots | ends).values(), default=1) == 1

    def come_to_rest(self) -> None:
        """Nobody dies any more, until nothing moves."""
        before = None
        while before != (before := (self.log.last, self.store._all("SELECT id, state FROM episodes"))):
            for _ in range(2):
                while self.inbox.waiting or self.sent:
                    self.collector_decides(100, None)
                while self.outgoing:
                    self.collector_publishes(100, dies=False)
                while self.ready.waiting:
                    self.learner_works(100, None)
                self.learner_works(1, None)
                self.report()
            self.now += RULES.deadline_s
            self.collector_decides(1, None)

    def reckon(self) -> None:
        """Every confirmed episode was trained once, or dropped for a reason; collector and log agree on which."""
        ledger = {row[0]: (row[1], row[2]) for row in self.store._all("SELECT id, state, reason FROM episodes")}
        assert ledger.keys() == self.slots.keys()
        told = {episode: reason for episode, (state, reason) in ledger.items() if state == "dropped"}
        trained = {episode for episode, (state, _) in ledger.items() if state == "trained"}
        assert not (lost := {e: fate for e, fate in ledger.items() if e not in trained | told.keys()}), lost
        assert all(told.values())
        logged = Counter(episode for place in self.log.places for episode in place.index.trained)
        dropped = {episode for place in self.log.places for episode in place.index.dropped}
        for place in self.log.places:
            index, stale = place.index, {e for e, reason in place.index.dropped.items() if reason == "stale"}
            assert all(self.sampled[e] >= index.version - 1 - RULES.max_staleness for e in index.trained)
            assert all(self.sampled[e] < index.version - RULES.max_staleness for e in stale)
        assert logged.keys() <= trained
        assert not dropped & trained
        assert not self.ready.waiting
        assert not self.ready.handed


def test_reports_that_no_broker_has_confirmed_outlive_the_checkpoints() -> None:
    """A learner that dies after every batch before it reports, and then removes all that its checkpoint does not need."""
    pipeline = Pipeline()
    for task in range(20):
        pipeline.a_task_is_done(task)
        pipeline.collector_decides(100, None)
        pipeline.collector_publishes(100, dies=False)
        pipeline.learner_works(100, "before the report")
    pipeline.learner_saves(None, keep=1)
    pipeline.teardown()


def test_what_waits_longer_than_it_may_is_dropped_as_stale_and_told() -> None:
    pipeline = Pipeline()
    for task in range(6):
        pipeline.a_task_is_done(task)
    pipeline.teardown()
    reasons = Counter(reason for place in pipeline.log.places for reason in place.index.dropped.values())
    assert reasons == {"stale": 4 * GROUP_SIZE}


def _id(body: bytes) -> str:
    episode = decode(body)
    assert isinstance(episode, Rollout)
    return episode.episode_id


TestPipeline = Pipeline.TestCase
TestPipeline.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
