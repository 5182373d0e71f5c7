"""Run on every rank of a sharded mixture of experts: one optimizer step, then what engines get and what is saved.

python expert_ranks.py MODEL TRAIN_JSON FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from support.episodes import make_group, route
from swarmq.config import Train
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.distributed.sharding import is_sharded
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer
from swarmq.weights.format.packing import materialize
from swarmq.weights.push.transfers import deduplicate


def main(model: str, train: Train, folder: Path) -> None:
    trainer, episodes = Trainer(model, train), tuple(route(make_group("a", (0.0, 1.0))))
    assert is_sharded(trainer.model)
    trainer.step(BatchRecord(index=BatchIndex(record=1, version=1), episodes=episodes, settings=train))
    trainer.save_weights(folder)
    if trainer.accelerator.is_main_process:
        pushed = {name: materialize(tensor).clone() for name, tensor in deduplicate(trainer.weights_to_push()).items()}
        save_file(pushed, folder / "pushed.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Train), Path(sys.argv[3]))
    leave_group()
