"""Engines that share GPUs with a learner leave them to it while it loads, and are awake before it waits for a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from swarmq.config import EngineSettings, Policy, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.learner import main
from swarmq.learner.feed.ipc import StopSignal
from swarmq.learner.store.writer_lock import hold_lock
from swarmq.learner.train import loop, trainer
from swarmq.learner.train.engine_updates import EngineUpdates
from swarmq.weights.push.pusher import PushReport

TRAIN = Train(gradient_checkpointing=False, token_log=False, trackers=())


class SharedGpu:
    """Has no room for a learner while its engines are awake."""

    failing: Mapping[str, str] = {}

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, too_small: bool = False) -> None:
        self.seen: list[str] = []
        self.too_small = too_small
        monkeypatch.setattr(trainer, "can_stay_gathered", lambda *_: self.check())
        monkeypatch.setattr(loop, "_control_group", object)
        monkeypatch.setattr(torch.distributed, "barrier", lambda group: self.seen.append("met" if group else "alone"))

    def sleep(self) -> None:
        self.seen.append("asleep")

    def wake(self) -> None:
        self.seen.append("awake")

    def repair(self, _: object, version: int) -> None:
        self.seen.append(f"repaired with {version}")

    def ensure(self, _: object, version: int) -> PushReport:
        self.seen.append(f"brought to {version}")
        return PushReport(version=version)

    def next(self, **_: object) -> None:
        self.seen.append("asked for a batch")

    def send(self, _: object) -> None: ...

    def finish(self) -> None: ...

    def check(self) -> None:
        self.seen.append("checked")
        if self.too_small:
            raise LearnerError("does not fit")

    def start(self, model: Path, folder: Path, *, sleep: bool, rank: int = 0) -> loop.Learner:
        policy = Policy(model=str(model), engine=EngineSettings(sleep=sleep), train=TRAIN)
        job = SwarmJob(run="r", folder=str(folder), policies={"main": policy})
        return loop.Learner(job, "main", pusher=None if rank else self, stop=StopSignal())


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_looks_at_its_gpu_before_engines_sleep_and_they_wake_when_all_have_loaded(
    rank: int, tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SharedGpu(monkeypatch)
    gpu.start(tiny_qwen, tmp_path, sleep=True, rank=rank)
    ours = ["asleep", "met", "checked", "met", "awake"]
    assert gpu.seen == [one for one in ours if rank == 0 or one in {"met", "checked"}]


def test_engines_beside_a_learner_are_left_awake(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SharedGpu(monkeypatch)
    gpu.start(tiny_qwen, tmp_path, sleep=False)
    assert {"asleep", "awake"}.isdisjoint(gpu.seen)


def test_a_learner_that_does_not_fit_leaves_its_engines_awake(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SharedGpu(monkeypatch, too_small=True)
    with pytest.raises(LearnerError, match="does not fit"):
        gpu.start(tiny_qwen, tmp_path, sleep=True)
    assert gpu.seen[-1] == "awake"


def test_engines_that_were_left_in_doubt_get_weights_before_anything_is_replayed(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SharedGpu(monkeypatch)
    learner = gpu.start(tiny_qwen, tmp_path, sleep=True)
    monkeypatch.setattr(learner, "_control", None)
    learner.run(gpu)
    assert gpu.seen[-4:-1] == ["awake", "repaired with 0", "asked for a batch"]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_has_reached_its_last_step_is_served_with_its_weights_when_it_is_started_again(
    stopped: bool, tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SharedGpu(monkeypatch)
    learner = gpu.start(tiny_qwen, tmp_path, sleep=False)
    monkeypatch.setattr(learner, "_control", None)
    learner.stop.asked = stopped
    learner.run(gpu)
    assert gpu.seen[-1] == ("repaired with 0" if stopped else "brought to 0")


@pytest.mark.parametrize("turn", [EngineUpdates.sleep, EngineUpdates.wake])
def test_a_learner_whose_place_was_taken_leaves_the_engines_to_the_other(
    turn: Callable[[EngineUpdates], None], tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SharedGpu(monkeypatch)
    learner = gpu.start(tiny_qwen, tmp_path, sleep=True)
    before = list(gpu.seen)
    learner.folder.parent.mkdir(parents=True)
    (learner.folder.parent / "lock").write_text("another process")
    with pytest.raises(LearnerError, match="taken over"):
        turn(learner.engines)
    assert gpu.seen == before


def test_a_pusher_asks_before_each_update_whether_its_learner_was_replaced(tmp_path: Path) -> None:
    policy = Policy(model="m", engine=EngineSettings(urls=("http://127.0.0.1:9",)))
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": policy})
    lock = job.run_folder.path / "main" / "lock"
    with hold_lock(lock):
        pusher = main._pusher(job, "main")
        pusher._check()
        lock.write_text("another process")
        with pytest.raises(LearnerError, match="taken over"):
            pusher._check()
