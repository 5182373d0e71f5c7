"""Run on every rank: one optimizer step of a batch. Rank 0 saves the gradient before and the weights after it.

python learner_ranks.py MODEL TRAIN_JSON TARGET
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from accelerate.state import AcceleratorState

from support.episodes import make_group
from swarmq.config import Train
from swarmq.learner import checkpoint
from swarmq.learner.passes import totals, work_of
from swarmq.learner.records import BatchRecord, Identity, Index
from swarmq.learner.sharding import is_sharded, whole
from swarmq.learner.trainer import Trainer

EPISODES = (*make_group("a", (0.0, 1.0, 0.5), turns=3), *make_group("b", (2.0, 0.0), turns=5, length=12))


def main(model: str, train: Train, target: Path) -> None:
    trainer = Trainer(model, train)
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    work = work_of(EPISODES, train, trainer.engine, rank=rank, world=world)
    trainer.accumulate(work, train, total=totals(EPISODES).of(train.normalisation))
    gradient = {n: whole(p.grad).clone() for n, p in trainer.lm.named_parameters() if p.grad is not None}
    trainer.optimizer.zero_grad()
    trainer.step(BatchRecord(index=Index(record=1, version=1), episodes=EPISODES, settings=train))
    if trainer.accelerator.is_main_process:
        weights = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
        torch.save({"gradient": gradient, "weights": weights, "sharded": is_sharded(trainer.model)}, target)
    trainer.accelerator.wait_for_everyone()
    if is_sharded(trainer.model):
        resumed(trainer, model, train, target.parent / "checkpoints")
    trainer.accelerator.end_training()


def resumed(trainer: Trainer, model: str, train: Train, folder: Path) -> None:
    """Going on from a checkpoint gives what going on without one gives."""
    identity = Identity(run="r", policy="main", model=model)
    checkpoint.save(folder, trainer, identity, model=model, keep=1)
    second = BatchRecord(index=Index(record=2, version=2), episodes=EPISODES, settings=train)
    trainer.step(second)
    wanted = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    found = checkpoint.newest(folder, identity)
    assert found is not None
    AcceleratorState._reset_state()
    again = Trainer(str(found.path), train, initial=model)
    checkpoint.restore(again, found)
    again.step(second)
    if again.accelerator.is_main_process:
        ours = dict(again.named_tensors())
        gap = max(float((ours[name] - tensor).abs().max()) for name, tensor in wanted.items())
        assert gap == 0, gap


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Train), Path(sys.argv[3]))
