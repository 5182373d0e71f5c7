"""Run on one rank, and on every rank of two hosts that shard a model within each: what `learner_ranks` makes of a larger batch, so
that each of four ranks has several passes. The hosts also gather layers anew in every pass, and go on from a checkpoint.

python hybrid_ranks.py MODEL TRAIN_JSON TARGET
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor

from support.episodes import make_group
from support.learner_ranks import EPISODES, learned, let_go, resumed
from swarmq.config import Train
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.distributed.sharding import is_sharded
from swarmq.learner.train.trainer import Trainer

MORE = (*EPISODES, *make_group("c", (0.0, 1.0, 0.5, 2.0), turns=5, length=12))


def main(model: str, train: Train, target: Path) -> None:
    trainer = Trainer(model, train)
    made = learned(trainer, train, MORE)
    if is_sharded(trainer.model):
        meshes = {each.device_mesh.shape for each in trainer.lm.parameters() if isinstance(each, DTensor)}
        assert meshes == {(2, 2)}, meshes
        let_go(model, train, made["gradient"], MORE)
        resumed(trainer, model, train, target.parent)
    if trainer.accelerator.is_main_process:
        torch.save(made, target)
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Train), Path(sys.argv[3]))
    leave_group()
