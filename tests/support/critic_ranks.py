"""Run on every rank, with each of some named settings: steps with a critic, a checkpoint, and another step, also from that checkpoint.
Rank 0 saves the weights of policy and critic before and after, and the metrics of the steps.

python critic_ranks.py MODEL TRAINS_JSON FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from support.learner_ranks import STEPS, batch, run_ways, weights, went_on
from swarmq.config import Train
from swarmq.learner.batching.micro_batches import make_idle_micro_batch
from swarmq.learner.checkpoint import save_load
from swarmq.learner.distributed.sharding import is_sharded
from swarmq.learner.store.records import RunIdentity
from swarmq.learner.train.trainer import Trainer

FIGURES = ("value_loss", "value_grad_norm", "explained_variance", "loss", "grad_norm")


def main(model: str, train: Train, folder: Path) -> None:
    trainer = Trainer(model, train)
    assert trainer.critic
    assert is_sharded(trainer.critic.model) == is_sharded(trainer.model) == (train.sharding == "full")
    before = everything(trainer)
    if is_sharded(trainer.critic.model):
        trainer.critic.score(trainer.place(make_idle_micro_batch()))
        assert all(isinstance(each, DTensor) for each in trainer.critic.model.parameters()), "nothing stays gathered"
    steps = [trainer.step(batch(version, train)) for version in range(1, STEPS + 1)]
    identity = RunIdentity(run="r", policy="main", model=model)
    save_load.save_checkpoint(folder / "checkpoints", trainer, identity, model=model, keep=1)
    steps.append(trainer.step(batch(STEPS + 1, train)))
    after, again = everything(trainer), everything(went_on(model, train, folder / "checkpoints"))
    if trainer.accelerator.is_main_process:
        assert all(torch.equal(again[name], weight) for name, weight in after.items()), "a checkpoint holds it all"
        figures = [{name: step.get(name, 0.0) for name in FIGURES} for step in steps]
        torch.save({"before": before, "after": after, "figures": figures}, folder / "made")
    trainer.accelerator.wait_for_everyone()


def everything(trainer: Trainer) -> dict[str, Any]:
    """The weights of the policy, and what is trained of the critic."""
    assert trainer.critic
    of_critic = trainer.critic.state()["weights"]
    return {**weights(trainer), **{f"critic.{name}": weight.clone() for name, weight in of_critic.items()}}


if __name__ == "__main__":
    run_ways(main)
