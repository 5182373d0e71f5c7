"""Run on every rank, with each of some settings: the gradient of a batch, then optimizer steps on it. Rank 0 saves that
gradient, and the weights before and after the steps.

Sharded ranks also save a checkpoint and the weights that one more step makes, go on from that checkpoint themselves, and
compute the gradient in BF16, with layers gathered anew in every pass, and row after row, all that with the first settings alone.
With parameters in host memory they do so on GPUs only; there the first settings have to say it, for the ranks' group to be able
to gather them.

python learner_ranks.py MODEL TRAINS_JSON TARGET
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import AutoModelForCausalLM

from support.episodes import make_group
from support.same_gradient import ROUNDING, assert_same_gradient
from swarmq.config import Train
from swarmq.learner.batching.micro_batches import RankBatch, build_rank_batch
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.checkpoint.model_files import HostCopies
from swarmq.learner.distributed import sharding
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.distributed.sharding import full_tensor, is_sharded
from swarmq.learner.memory import plan
from swarmq.learner.methods import registry
from swarmq.learner.model import attention_check, layout_model
from swarmq.learner.model.layout_model import PlacedLayout, find_decoder_layers
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout

EPISODES = (*make_group("a", (0.0, 1.0, 0.5), turns=3), *make_group("b", (2.0, 0.0), turns=5, length=12))
DEMONSTRATIONS = tuple(make_group("shown", (1.0, 1.0, 1.0), turns=2, length=20))
"""What settings with `sft` train besides."""

STEPS = 3
"""The first of AdamW's goes by the signs of the gradient alone."""


def main(model: str, trains: Sequence[Train], target: Path) -> None:
    made = []
    for number, train in enumerate(trains):
        if number:
            forget()
        registry.read_own(train, str(target.parent))
        with loading() as (held, read):
            trainer = Trainer(model, train)
        if is_sharded(trainer.model):
            models, mine = 1 + len(trainer.frozen.of(train)), int(trainer.accelerator.is_main_process)
            assert read.call_count == models * mine, "rank 0 alone reads weights"
            assert held == [trainer.num_parameters * mine] * models, "the others hold none until they get their shares"
        made.append(learned(trainer, train))
        trainer.accelerator.wait_for_everyone()
        if is_sharded(trainer.model) and not number:
            assert len(find_decoder_layers(trainer.lm)) == trainer.lm.config.num_hidden_layers, (
                "what is not found is not compiled"
            )
            let_go(model, train, made[0]["gradient"])
            one_by_one(model, train, made[0]["gradient"])
            resumed(trainer, model, train, target.parent)
            in_bf16 = msgspec.structs.replace(train, mixed_precision="bf16")
            precise(model, in_bf16, made[0]["gradient"], target.parent / "precise")
    if trainer.accelerator.is_main_process:
        torch.save(made, target)
    trainer.accelerator.wait_for_everyone()


def learned(trainer: Trainer, train: Train, episodes: tuple[Rollout, ...] = EPISODES) -> dict[str, Any]:
    """The gradient of the batch, and what `STEPS` steps on it make of the weights; these on rank 0."""
    work = own_work(trainer, train, episodes)
    gatherings, gathered = counted()
    with gatherings:
        supervised = trainer.build_supervised(DEMONSTRATIONS, train)
        fields = trainer.accumulate(work, train, supervised=supervised).fields
    if is_sharded(trainer.model) and not train.lora:
        assert len(work.passes) > 1
        stayed = gathered.call_count == len(parts(trainer)) * (2 if train.sft else 1)
        assert stayed != train.cpu_offload, (
            "layers stay together from pass to pass, but not of parameters that lie elsewhere"
        )
    gradient = {n: full_tensor(p.grad).clone() for n, p in trainer.lm.named_parameters() if p.grad is not None}
    trainer.optimizer.zero_grad()
    before = weights(trainer)
    steps = [trainer.step(batch(n + 1, train, episodes)) for n in range(STEPS)]
    for judge in trainer.frozen.of(train).values():
        assert is_sharded(judge._model) == is_sharded(trainer.model)
    return {
        "sharded": is_sharded(trainer.model),
        "left_out": fields["tokens_left_out"],
        "gradient": gradient,
        "norms": [each["grad_norm"] for each in steps],
        "figures": [fields, *steps],
        "before": before,
        "weights": weights(trainer),
    }


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """On rank 0; where ranks share them out, there alone."""
    if is_sharded(trainer.model) and not trainer.accelerator.is_main_process:
        return {}
    return {name: tensor.clone() for name, tensor in trainer.named_tensors()}


def own_work(trainer: Trainer, train: Train, episodes: tuple[Rollout, ...] = EPISODES) -> RankBatch:
    rank, world = trainer.share
    return build_rank_batch(episodes, train, trainer.traits, rank=rank, world=world)


def batch(version: int, train: Train, episodes: tuple[Rollout, ...] = EPISODES) -> BatchRecord:
    index = BatchIndex(record=version, version=version)
    shown = DEMONSTRATIONS if train.sft else ()
    return BatchRecord(index=index, episodes=episodes, settings=train, demonstrations=shown)


@contextlib.contextmanager
def loading() -> Iterator[tuple[list[int], mock.Mock]]:
    """How many parameters this rank has values of when a model is about to be shared out, and its reading of weights."""
    held: list[int] = []
    hand_out, from_pretrained = sharding.shard_from_rank0, AutoModelForCausalLM.from_pretrained

    def counting(model: torch.nn.Module, accelerator: Accelerator) -> Any:
        held.append(sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta))
        return hand_out(model, accelerator)

    with (
        mock.patch.object(sharding, "shard_from_rank0", counting),
        mock.patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=from_pretrained) as read,
    ):
        yield held, read


def precise(model: str, train: Train, exact: dict[str, torch.Tensor], scratch: Path) -> None:
    """Layers compute in BF16, and engines get their weights so; what is divided, subtracted, added up or kept is FP32."""
    forget()
    trainer = Trainer(model, train)
    seen: set[torch.dtype] = set()
    for layer in trainer.lm.get_decoder().layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(
                each.dtype
                for each in (*args, *kwargs.values())
                if isinstance(each, torch.Tensor) and each.is_floating_point()
            ),
            with_kwargs=True,
        )
    work = own_work(trainer, train)
    placed, warm = PlacedLayout.of(work.passes[0].layout, trainer.accelerator.device), torch.full((), 0.7)
    with torch.no_grad():
        scored = trainer.model(placed, warm.expand(len(placed.targets)))
    assert seen == {torch.bfloat16}, seen
    assert scored.logprobs.dtype == scored.entropies.dtype == torch.float32
    assert not torch.equal(scored.logprobs, scored.logprobs.bfloat16().float()), "FP32 in name only"
    trainer.accumulate(work, train)
    for name, parameter in trainer.lm.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        made = full_tensor(parameter.grad)
        assert not torch.equal(made, made.bfloat16().float()), f"{name}: added up in BF16"
        apart = float((made - exact[name]).norm() / exact[name].norm())
        assert apart < 0.1, (name, apart)
    scratch.mkdir(exist_ok=True)
    trainer.save_weights(scratch)
    if trainer.accelerator.is_main_process:
        for_engines = dict(trainer.named_tensors())
        saved = load_file(scratch / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
        assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values() if tensor.ndim > 1)
        assert all(torch.equal(for_engines[name], tensor.bfloat16()) for name, tensor in saved.items())


def forget() -> None:
    """A process may make another trainer: on GPUs accelerate would take the sharding of the last one for done."""
    AcceleratorState._reset_state()
    if torch.cuda.is_available() and torch.distributed.is_initialized():
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def run_ways(main: Callable[[str, Train, Path], None]) -> None:
    """Call `main` with the model and each named way of training of this program's arguments, and a folder for what it makes."""
    torch.set_num_threads(1)
    for name, train in msgspec.json.decode(sys.argv[2], type=dict[str, Train]).items():
        forget()
        main(sys.argv[1], train, Path(sys.argv[3]) / name)
    leave_group()


def counted() -> tuple[contextlib.AbstractContextManager[Any], mock.Mock]:
    """What is called, in the context, whenever torch gathers a part of a policy."""
    gather, told = _fsdp_param_group.foreach_all_gather, mock.Mock()

    def counting(parameters: list[Any], *arguments: Any) -> Any:
        if any(each.sharded_param.requires_grad for each in parameters):
            told()
        return gather(parameters, *arguments)

    return mock.patch.object(_fsdp_param_group, "foreach_all_gather", counting), told


def parts(trainer: Trainer) -> list[FSDPModule]:
    """What is gathered at once."""
    return [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]


def let_go(model: str, train: Train, wanted: dict[str, torch.Tensor], episodes: tuple[Rollout, ...] = EPISODES) -> None:
    """Where a GPU has no room for the whole, layers are gathered anew in every pass, and the gradient is the same."""
    forget()
    with mock.patch.object(plan, "has_room_for_whole", return_value=False):
        trainer = Trainer(model, train)
    work = own_work(trainer, train, episodes)
    gatherings, gathered = counted()
    with gatherings:
        trainer.accumulate(work, train)
    assert gathered.call_count > len(work.passes) * len(parts(trainer))
    same(trainer, wanted)


def one_by_one(model: str, train: Train, wanted: dict[str, torch.Tensor]) -> None:
    """A model that computes row after row gathers its layers for each of them, on every rank as often as on the others.

    One alone cannot compile its attention."""
    last = int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])
    for held in (False,) if train.cpu_offload else (False, True):
        forget()
        with (
            mock.patch.object(plan, "has_room_for_whole", return_value=held),
            mock.patch.object(
                layout_model,
                "agree_on_reason",
                side_effect=lambda _: attention_check.agree_on_reason("refused" if last else None),
            ),
        ):
            trainer = Trainer(model, train)
            assert trainer.traits.rows_only == "refused"
            work = own_work(trainer, train)
            assert any(len(one.layout.node_starts) > 1 for one in work.passes)
            trainer.accumulate(work, train)
        same(trainer, wanted)


def same(trainer: Trainer, wanted: dict[str, torch.Tensor], tolerance: float = ROUNDING) -> None:
    """Whether this is the gradient that the ranks made."""
    assert_same_gradient({name: full_tensor(p.grad) for name, p in trainer.lm.named_parameters()}, wanted, tolerance)


def went_on(model: str, train: Train, folder: Path) -> Trainer:
    """A new trainer, after the next step from the newest checkpoint."""
    found = discovery.find_newest(folder, RunIdentity(run="r", policy="main", model=model))
    assert found is not None
    forget()
    trainer = Trainer(str(found.path), train, initial=model)
    save_load.restore(trainer, found)
    trainer.step(batch(STEPS + 1, train))
    return trainer


def resumed(trainer: Trainer, model: str, train: Train, scratch: Path) -> None:
    """Going on from a checkpoint, which is written beside the next step, gives what going on without one gives."""
    identity, folder = RunIdentity(run="r", policy="main", model=model), scratch / "checkpoints"
    draft = save_load.draft_checkpoint(folder, trainer, identity, model=model, copies=HostCopies())
    before = weights(trainer)
    trainer.step(batch(STEPS + 1, train))
    if trainer.accelerator.is_main_process:
        save_load.finish_checkpoint(draft, keep=1)
    trainer.accelerator.wait_for_everyone()
    wanted = weights(trainer)
    if trainer.accelerator.is_main_process:
        torch.save(wanted, scratch / "next")
    again = went_on(model, train, folder)
    if again.accelerator.is_main_process:
        ours = dict(again.named_tensors())
        for name, tensor in wanted.items():
            apart = float((ours[name] - tensor).norm() / (tensor - before[name]).norm())
            assert apart <= (0.02 if torch.cuda.is_available() else 0), (name, apart)  # a GPU adds up in any order


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=list[Train]), Path(sys.argv[3]))
    leave_group()
