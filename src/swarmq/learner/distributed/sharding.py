"""Parameters, gradients and optimizer state spread over the ranks: FSDP2, by accelerate.

Each decoder layer is gathered when it is computed. Where a GPU has room for the whole model beside its share, layers stay
gathered until the last pass of a step, which alone adds gradients up over the ranks; otherwise each is freed again and its
gradient shared out in every pass. Weights for engines and checkpoints are gathered whole, on every rank in the same order,
and kept by rank 0 alone: for engines after every step, in the type that layers compute in; for checkpoints as they are, and
the optimizer's state, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.distributed.shard_from_rank0 import hand_out
from swarmq.weights.format.packing import Adapter, FromFolder, NamedTensors, Weight, held, made

PRECISION = {
    "no": None,
    "bf16": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    ),
}
"""Layers compute in BF16, since their weights are; what goes into the model (temperatures) and comes out of it
(log-probabilities) stays FP32, and gradients are added up in FP32. accelerate's own choice is BF16 for all of these."""

Made = TypeVar("Made")
AsNamed = Callable[[Mapping[str, Tensor]], NamedTensors]


def plugin(train: Train) -> FullyShardedDataParallelPlugin:
    """Full sharding of every decoder layer, as transformers names it."""
    os.environ["FSDP_OFFLOAD_PARAMS"] = str(train.cpu_offload).lower()  # accelerate founds CPU collectives by it alone
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=train.cpu_offload,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=PRECISION[train.precision(cuda=torch.cuda.is_available())],
    )


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """What matrix products and attention are computed in, sharded or not."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32


def shard_on_cpu(accelerator: Accelerator, plan: FullyShardedDataParallelPlugin) -> None:
    """accelerate shards only over accelerators; torch also shards over processes without any, which tests use."""
    if accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP  # noqa: SLF001
        accelerator.state.fsdp_plugin = plan


def check_collectives(train: Train, device: torch.device) -> None:
    """Raises LearnerError when tensors where they are kept cannot be gathered."""
    kept_on = "cpu" if train.cpu_offload else device.type
    backends = torch.distributed.get_backend_config()
    if f"{kept_on}:" not in backends:
        raise LearnerError(
            f"train.cpu_offload: the ranks' process group ({backends}) cannot gather what lies in {kept_on} memory; let "
            "swarmq-learner --num-gpus start the ranks, or set FSDP_OFFLOAD_PARAMS=true for your launcher"
        )


def hold(accelerator: Accelerator) -> None:
    """Before a model is prepared: its layers stay gathered from its forward to its backward pass."""
    accelerator.state.fsdp_plugin.reshard_after_forward = False


def accumulate(model: Any, *, last: bool) -> None:
    """Before a pass of a model that is held: only the `last` one of a step adds gradients up and lets layers go."""
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def shares_out(accelerator: Accelerator) -> bool:
    """Whether the ranks hold a part of every model each. Rank 0 alone loads them then."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def without_weights(accelerator: Accelerator) -> bool:
    """Whether this rank builds models empty, to be handed its part by rank 0."""
    return shares_out(accelerator) and not accelerator.is_main_process


def prepared(model: nn.Module, accelerator: Accelerator, optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> Any:
    """The model that is trained, laid out over the ranks, and what `optimizer` makes of its trained parameters."""
    if shares_out(accelerator):
        sharded = hand_out(model, accelerator)
        return sharded, accelerator.prepare_optimizer(optimizer(_trained(sharded)))
    return accelerator.prepare(model, optimizer(_trained(model)))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen(model: nn.Module, accelerator: Accelerator) -> Any:
    """A model that is never trained, on the accelerator's device; shared out over the ranks if the policy is."""
    if shares_out(accelerator):
        plan = accelerator.state.fsdp_plugin  # which knows the policy's layers by now
        plan.auto_wrap_policy, plan.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, None
        plan.reshard_after_forward = True
        return hand_out(model, accelerator).eval()
    return accelerator.prepare_model(model, evaluation_mode=True).eval()


def is_sharded(model: nn.Module) -> bool:
    """Also while its layers are gathered."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard; a collective. Others as they are."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def gathered(named: Mapping[str, Weight], *, keep: bool) -> dict[str, Tensor]:
    """Sharded tensors whole, in host memory of their own where `keep`; empty elsewhere. Every rank calls it."""

    def bring(_: str, tensor: Weight) -> Tensor:
        full = whole(made(tensor))
        return full.to("cpu", copy=True) if keep else full.new_empty(0)

    weights = _each_once(named, bring)
    return weights if keep else {}


def computed_with(
    model: nn.Module, lm: Any, *, keep: bool, into: Mapping[str, Weight], as_named: AsNamed
) -> dict[str, Weight]:
    """The weights of `lm` inside of the sharded `model`, in the type that layers compute in, in host memory where `keep`; empty
    elsewhere. Every rank calls it.

    A layer's weights come together at once, as they do when it is computed: a tenth of the collectives. `into`: what an
    earlier call gave, filled anew; memory that a GPU writes without the processor's help is slow to get. What the model's folder
    has stays as it is there. `as_named`: from weights that are there to what is wanted of them.
    """

    def bring(name: str, weight: Weight) -> Weight:
        return _on_host(weight, into.get(name))

    saved = lm.state_dict(keep_vars=True)  # which torch makes of shards alone
    apart = {name: each for name, each in saved.items() if not isinstance(each, DTensor)}
    weights: dict[str, Weight] = _each_once(dict(as_named(apart)), bring) if keep else {}
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            if keep:
                named = lm.named_parameters(remove_duplicate=False)
                ready = {name: each for name, each in named if name in saved and not isinstance(each, DTensor)}
                weights |= _each_once(dict(as_named(ready)), bring)
            part.reshard()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {name: weights[name] for name, _ in as_named(saved)} if keep else {}


def _each_once(named: Mapping[str, Weight], bring: Callable[[str, Weight], Made]) -> dict[str, Made]:
    """By name, what `bring` makes of every tensor: once of one that has several names (a tied head)."""
    places: dict[int, Made] = {}
    for name, tensor in named.items():
        if id(held(tensor)) not in places:
            places[id(held(tensor))] = bring(name, tensor)
    return {name: places[id(held(tensor))] for name, tensor in named.items()}


def _on_host(weight: Weight, place: Weight | None) -> Weight:
    """`place`: of the same weight before."""
    if not isinstance(weight, FromFolder):
        assert place is None or isinstance(place, Tensor)
        return _kept(made(weight).detach().to(weight.dtype), place)
    before = place if isinstance(place, FromFolder) else FromFolder(_kept(made(weight.base).detach(), None))
    if weight.adapter is None:
        return before
    down, up = weight.adapter.down.float(), weight.adapter.up.float()
    kept = before.adapter
    return FromFolder(
        before.base,
        Adapter(_kept(down, kept and kept.down), _kept(up, kept and kept.up), weight.adapter.scale),
    )


def _kept(full: Tensor, place: Tensor | None) -> Tensor:
    """On the host, in `place` if there is one; on its way there while the GPU is not waited for."""
    if not full.is_cuda:
        return full.clone() if place is None else place.copy_(full)
    if place is None:
        place = torch.empty(full.shape, dtype=full.dtype, pin_memory=True)
    return place.copy_(full, non_blocking=True)


class WholeState:
    """The state of a sharded optimizer, saved and loaded as that of one process: any number of ranks goes on from it."""

    def __init__(self, optimizer: Any, *, keep: bool) -> None:
        """`keep`: whether this rank is the one that saves."""
        self._optimizer, self._keep = optimizer, keep

    def state_dict(self) -> dict[str, Any]:
        """In host memory of its own. Every rank calls it; without tensors where not kept."""
        saved: dict[str, Any] = self._optimizer.state_dict()
        whole_state: dict[int, dict[str, Any]] = {}
        for index, values in saved["state"].items():
            full = {name: whole(value) for name, value in values.items()}
            whole_state[index] = (
                {name: value.to("cpu", copy=True) for name, value in full.items()} if self._keep else {}
            )
        return {**saved, "state": whole_state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take this rank's part."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        parts = {
            index: {name: _part(value, parameters[index]) for name, value in values.items()}
            for index, values in saved["state"].items()
        }
        self._optimizer.load_state_dict({**saved, "state": parts})


def _part(value: Tensor, of: Tensor) -> Tensor:
    """This rank's shard of what belongs to the parameter `of`; a number, such as the count of steps, as it is."""
    if not isinstance(of, DTensor) or value.shape != of.shape:
        return value
    return distribute_tensor(value, of.device_mesh, of.placements, src_data_rank=None).clone()
