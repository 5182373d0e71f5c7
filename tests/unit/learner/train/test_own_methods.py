"""Steps with methods of the user's own are repeated from the log. test_gradient.py has their gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.episodes import make_group
from support.own_methods import ADVANTAGE, LOSS, write_own_methods
from swarmq.config import Loss, Train
from swarmq.learner.methods import registry
from swarmq.learner.store.records import BatchIndex, BatchRecord, decode_record, encode_record
from swarmq.learner.train.trainer import Trainer

TRAIN = Train(
    gradient_checkpointing=False,
    learning_rate=1e-3,
    warmup_steps=0,
    advantage=ADVANTAGE,
    loss=Loss(name=LOSS, options={"cap": 1.5}),
    deterministic=True,
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = write_own_methods(tmp_path)
    registry.read_own(TRAIN, str(tmp_path))
    return path


def batch(version: int) -> BatchRecord:
    episodes = (*make_group("a", (0.0, 1.0, 5.0), turns=3), *make_group("b", (2.0, 0.0), turns=4))
    index = BatchIndex(record=version, version=version, trained=tuple(episode.episode_id for episode in episodes))
    return BatchRecord(index=index, episodes=episodes, settings=TRAIN, methods=registry.describe_methods(TRAIN))


def train_again(model: Path, records: list[bytes]) -> dict[str, torch.Tensor]:
    trainer = Trainer(str(model), TRAIN)
    for record in records:
        trainer.step(decode_record(record))
    return {name: tensor.detach().clone() for name, tensor in trainer.lm.named_parameters()}


def test_a_log_is_replayed_bit_for_bit_with_what_trained_although_the_file_has_changed(
    tiny_qwen: Path, own: Path
) -> None:
    before = own.read_text()
    records = [encode_record(batch(1)), encode_record(batch(2))]
    trained = train_again(tiny_qwen, records)
    own.write_text(before.replace("reward - median", "reward + median").replace("-weight", "weight"))
    registry.read_own(TRAIN, str(own.parent))
    again = train_again(tiny_qwen, records)
    assert all(torch.equal(tensor, again[name]) for name, tensor in trained.items())
    registry.read_own(TRAIN, str(own.parent))
    changed = train_again(tiny_qwen, [encode_record(batch(1))])
    assert any(not torch.equal(tensor, changed[name]) for name, tensor in train_again(tiny_qwen, records[:1]).items())
