"""What people watch: every figure of every step reaches the tracker, and a missing package is said by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.episodes import make_group
from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.records import BatchRecord, Index
from swarmq.learner.summary import describe, tally
from swarmq.learner.trackers import Trackers, check, flat
from swarmq.learner.trainer import Trainer

TRAIN = Train(gradient_checkpointing=False, ratio_band=(0.9, 1.1), token_log=False)
LOGGED_EVERY_STEP = {
    "reward", "reward_by_kind/default", "success_by_kind/default", "kl_k3", "gap_p99", "effective_samples",
    "clipped_positive", "clipped_negative", "filtered_positive", "filtered_negative", "kl_reference", "entropy",
    "grad_norm", "staleness/0", "truncated", "equal_groups", "partial_groups", "length_penalised", "tokens_sampled",
    "tokens_computed", "drifted", "branches/history_edited", "tokens_per_s", "mfu", "train_s", "loss", "learning_rate",
}  # fmt: skip
"""Of a step; the loop adds what it measures around it: folding, wait_s, push_s, pause_s and pauses."""


def test_tensorboard_gets_every_figure_of_a_step(tiny_qwen: Path, tmp_path: Path) -> None:
    group = make_group("a", (0.0, 1.0), success=True)
    first, *rest = group[0].turns
    turns = (first, *(msgspec.structs.replace(turn, branch="history_edited") for turn in rest))
    episodes = (msgspec.structs.replace(group[0], turns=turns), group[1])
    record = BatchRecord(index=Index(record=1, version=1, tally=tally(episodes)), episodes=episodes, settings=TRAIN)
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trackers = Trackers(trainer.accelerator, TRAIN, run="r", policy="main", folder=tmp_path)
    trackers.log(1, describe(record, []) | trainer.step(record))
    trackers.close()
    read = EventAccumulator(str(tmp_path / "r.main")).Reload()
    assert set(read.Tags()["scalars"]) >= LOGGED_EVERY_STEP
    (point,) = read.Scalars("reward")
    assert (point.step, point.value) == (1, 0.5)


def test_a_missing_package_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    check(("tensorboard",))
    with pytest.raises(LearnerError, match=r"train.trackers: not installed: wandb; pip install wandb"):
        check(("tensorboard", "wandb"))


def test_a_tracker_that_fails_costs_a_warning_and_not_the_step(tmp_path: Path) -> None:
    class Broken:
        is_main_process = True

        def log(self, *_: object, **__: object) -> None:
            raise ConnectionError

    trackers = Trackers.__new__(Trackers)
    trackers._accelerator, trackers._on = Broken(), True
    trackers.log(1, {"loss": 1.0})


def test_numbers_in_dictionaries_get_a_path_and_texts_are_left_out() -> None:
    assert dict(flat({"a": 1, "b": {"c": 2.5, "d": "x"}, "e": "rows", "f": True})) == {"a": 1, "b/c": 2.5, "f": 1}
