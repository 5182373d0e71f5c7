"""Run on every rank: steps of adapters that are held to the initial model, which is under them, and the same steps with it loaded
a second time. Rank 0 saves the weights and the adapters after them, and a checkpoint; all go on from that.

python lora_ranks.py MODEL TRAINS_JSON FOLDER        with a folder for each of the named settings
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import msgspec
import torch
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from support.learner_ranks import EPISODES, STEPS, batch, forget, run_ways, weights, went_on
from support.same_gradient import MOVED, assert_same_way
from swarmq.config import Train
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.checkpoint import save_load
from swarmq.learner.distributed.sharding import is_sharded
from swarmq.learner.memory import plan
from swarmq.learner.model.layout_model import PlacedLayout
from swarmq.learner.store.records import RunIdentity
from swarmq.learner.teachers.reference_models import FrozenModel
from swarmq.learner.train.trainer import Trainer
from swarmq.weights.format.adapter_file import open_merged
from swarmq.weights.format.packing import CPU, materialize
from swarmq.weights.format.served_folder import ServedFolder
from swarmq.weights.push.transfers import AdapterTransfer, deduplicate

Tensors = dict[str, torch.Tensor]
CUDA = torch.cuda.is_available()
NEAR = 0.02 if CUDA else MOVED
"""Of a weight's way; GPUs add up in any order."""
ROUNDED = 0.5
"""The same in BF16: AdamW's first steps go by the signs of gradients alone."""


def main(model: str, train: Train, folder: Path) -> None:
    ours = trained(model, train)
    forget()
    named = trained(model, msgspec.structs.replace(train, reference=model))
    world, rank, device = ours.accelerator.num_processes, ours.accelerator.process_index, ours.accelerator.device
    is_main, sharded = ours.accelerator.is_main_process, is_sharded(ours.model)
    assert sharded == (world > 1 and train.sharding == "full")
    assert isinstance(ours.model, DistributedDataParallel) == (world > 1 and not sharded)
    if is_main:
        wanted = weights(named)
        assert_alike(weights(ours), wanted, model, train)
    if sharded:
        forget()
        with mock.patch.object(
            plan, "has_room_for_whole", return_value=False
        ):  # layers are gathered anew in every pass
            apart = trained(model, train)
        if is_main:
            assert_alike(weights(apart), wanted, model, train, exact=False)
    initial = FrozenModel(model, ours.accelerator, role="reference", vocab=0)
    for one in build_rank_batch(EPISODES, train, ours.traits, rank=rank, world=world).passes:
        asked = PlacedLayout.of(one.layout, device), torch.from_numpy(one.temperatures).to(device)
        reference = ours.frozen.of(train)["reference"].score(*asked).logprobs
        near = 0.05 if in_bf16(train) else 1e-4 if CUDA else 0  # the other one's weights are FP32
        torch.testing.assert_close(reference, initial.score(*asked).logprobs, rtol=0, atol=near)
        with torch.no_grad():
            policy = ours.accelerator.unwrap_model(ours.model)(*asked).logprobs
        assert one.idle or not torch.equal(reference, policy), "nothing was learned"
    identity = RunIdentity(run="r", policy="main", model=model)
    save_load.save_checkpoint(folder / "checkpoints", ours, identity, model=model, keep=1)
    if is_main:
        assert_adapters_travel(ours, model, folder)
        torch.save(weights(ours), folder / "made")
    gone_on(model, train, folder, ours)
    if is_main:
        assert_adapters_travel(ours, model, folder)
    ours.accelerator.wait_for_everyone()


def assert_adapters_travel(trainer: Trainer, model: str, folder: Path) -> None:
    """Nothing else does, and an engine that has the model's folder makes of them the weights of this moment."""
    transfer, sent = AdapterTransfer(["http://far.example:8000"], folder), deduplicate(trainer.weights_to_push())
    assert sent.keys() == first(model).keys(), "a tied head has one name"
    path = transfer.publish(sent, trainer.version, "float32").update_info["adapters"]
    assert all(":" in name for name in load_file(path))
    exact = {"rtol": 0, "atol": 1e-5 if CUDA else 0}
    wanted = dict(trainer.named_tensors())
    with open_merged(path, ServedFolder(Path(model)), CPU) as merged:
        for name, weight in merged.items():
            torch.testing.assert_close(materialize(weight), wanted[name].float().cpu(), **exact)
    transfer.withdraw()


def assert_alike(ours: Tensors, wanted: Tensors, model: str, train: Train, *, exact: bool = True) -> None:
    """Weights after the same steps from the model in a folder."""
    if exact and not CUDA and not in_bf16(train):
        assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())
        return
    before = first(model)
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, wanted[name].cpu())}
    ours, wanted, before = ({name: each[name].cpu() for name in moved} for each in (ours, wanted, before))
    assert_same_way(ours, wanted, before, ROUNDED if in_bf16(train) else NEAR)


def in_bf16(train: Train) -> bool:
    return train.mixed_precision == "bf16"


def first(model: str | Path) -> Tensors:
    """The weights in a folder."""
    return load_file(Path(model) / "model.safetensors")


def trained(model: str, train: Train) -> Trainer:
    trainer = Trainer(model, train)
    for version in range(1, STEPS + 1):
        trainer.step(batch(version, train))
    return trainer


def gone_on(model: str, train: Train, folder: Path, ours: Trainer) -> None:
    """A step from the checkpoint is the step without it, however many ranks wrote it."""
    ours.step(batch(STEPS + 1, train))
    again = went_on(model, train, folder / "checkpoints")
    if ours.accelerator.is_main_process:
        wanted = weights(ours)
        assert_alike(weights(again), wanted, model, train)
        torch.save(wanted, folder / "next")


if __name__ == "__main__":
    run_ways(main)
