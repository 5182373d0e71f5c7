"""Run on every rank, each of which has the whole model: steps of adapters that are held to the initial model, which is under
them, and the same steps with it loaded a second time. Rank 0 saves the weights after them.

python lora_ranks.py MODEL TRAIN_JSON TARGET
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from support.learner_ranks import EPISODES
from swarmq.config import Train
from swarmq.learner.frozen import Frozen
from swarmq.learner.passes import work_of
from swarmq.learner.records import BatchRecord, Index
from swarmq.learner.trainer import Trainer
from swarmq.learner.tree import Placed


def main(model: str, train: Train, target: Path) -> None:
    ours, named = trained(model, train), trained(model, msgspec.structs.replace(train, reference=model))
    wanted = dict(named.named_tensors())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in ours.named_tensors())
    world, rank = ours.accelerator.num_processes, ours.accelerator.process_index
    assert isinstance(ours.model, DistributedDataParallel) == (world > 1)
    initial = Frozen(model, ours.accelerator, role="reference", vocab=0)
    for one in work_of(EPISODES, train, ours.engine, rank=rank, world=world).passes:
        asked = Placed.of(one.layout, ours.accelerator.device), torch.from_numpy(one.temperatures)
        reference = ours.frozen.of(train)["reference"].logprobs(*asked)
        assert torch.equal(reference, initial.logprobs(*asked))
        policy = ours.accelerator.unwrap_model(ours.model)(*asked).logprobs
        assert one.idle or not torch.equal(reference, policy), "nothing was learned"
    if ours.accelerator.is_main_process:
        torch.save(wanted, target)
    ours.accelerator.wait_for_everyone()
    ours.accelerator.end_training()


def trained(model: str, train: Train) -> Trainer:
    trainer = Trainer(model, train)
    for version in (1, 2, 3):
        trainer.step(BatchRecord(index=Index(record=version, version=version), episodes=EPISODES, settings=train))
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Train), Path(sys.argv[3]))
