"""Sharding of parameters, gradients and optimizer state over the ranks: FSDP2, by accelerate.

Each decoder layer is gathered when it is computed. If a GPU has room for the whole model besides its shard, layers stay
gathered until the last pass of a step, and only that pass reduces gradients over the ranks. Otherwise each layer is freed again and
its gradient reduced in every pass. With replicas of the shards (HSDP), layers are gathered within a host, and hosts exchange
gradients once a step. Weights for engines and checkpoints are gathered whole, on every rank in the same order, and only rank 0
keeps them: for engines after every step, in the compute dtype; for checkpoints unconverted, with the optimizer's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from swarmq.config import Train
from swarmq.learner.distributed.send_from_rank0 import send_model
from swarmq.learner.distributed.shard_from_rank0 import shard_from_rank0
from swarmq.weights.format.packing import (
    FolderWeight,
    LowRankUpdate,
    NamedTensors,
    Weight,
    get_stored_tensor,
    materialize,
)

PRECISION = {
    "no": None,
    "bf16": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    ),
}
"""Dtypes of sharded computation. Layers compute in BF16, like their weights; the model's inputs (temperatures) and outputs
(log-probabilities) stay FP32, and gradients are reduced in FP32. accelerate's default is BF16 for all of these."""

Made = TypeVar("Made")
AsNamed = Callable[[Mapping[str, Tensor]], NamedTensors]


def build_fsdp_plugin(train: Train) -> FullyShardedDataParallelPlugin:
    """Return the FSDP plug-in that shards every decoder layer, as named by transformers."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=train.cpu_offload,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=PRECISION[train.precision(cuda=torch.cuda.is_available())],
    )


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """Return the dtype of matrix products and attention, with or without sharding."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32


def shard_on_cpu(accelerator: Accelerator, plan: FullyShardedDataParallelPlugin) -> None:
    """Enable sharding over CPU processes, which tests use: torch supports it, but accelerate shards only over accelerators."""
    if accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP  # noqa: SLF001
        accelerator.state.fsdp_plugin = plan


def replicate_shards(accelerator: Accelerator, ranks: int) -> None:
    """Let every group of `ranks` neighbouring ranks, the ranks of one host, shard a replica of each model (HSDP)."""
    replicas = ParallelismConfig(dp_replicate_size=accelerator.num_processes // ranks, dp_shard_size=ranks)
    accelerator.state.device_mesh = replicas.get_device_mesh(accelerator.device.type)
    accelerator.state.parallelism_config = replicas


def keep_layers_gathered(accelerator: Accelerator) -> None:
    """Keep layers gathered between forward and backward pass. Called before models are prepared."""
    accelerator.state.fsdp_plugin.reshard_after_forward = False


def set_gradient_sync(model: Any, *, last: bool, held: bool) -> None:
    """Set whether the next pass of a sharded model reduces gradients and frees layers; call it before each pass. Only the `last` pass
    of a step reduces gradients over replicas. If layers stay gathered (`held`), only it reduces gradients over shards and frees
    layers."""
    if held:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    else:
        model.set_requires_all_reduce(last)


def is_sharding(accelerator: Accelerator) -> bool:
    """Return whether each rank holds a part of every model."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def accumulate_gradients(
    model: Any, accelerator: Accelerator, *, last: bool, held: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a pass, in which ranks exchange gradients only if it is the `last` one. `held` as for
    `set_gradient_sync`."""
    if is_sharded(model):
        set_gradient_sync(model, last=last, held=held)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else accelerator.no_sync(model)


def prepare_model(
    model: nn.Module,
    accelerator: Accelerator,
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], Optimizer],
    *,
    further: bool = False,
) -> Any:
    """Return the model to train, distributed over the ranks, and its optimizer.

    `optimizer`: creates the optimizer for given parameters, each with its name. `further`: whether it is another model than the
    policy, which was prepared first.
    """
    if is_sharding(accelerator):
        if further:
            _plan_anew(accelerator)
        sharded = shard_from_rank0(model, accelerator)
        return sharded, accelerator.prepare_optimizer(optimizer(_trained(sharded)))
    send_model(model, accelerator.device)
    return accelerator.prepare(model, optimizer(_trained(model)))


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def prepare_frozen_model(model: nn.Module, accelerator: Accelerator) -> Any:
    """Return a model that is never trained, on the accelerator's device, sharded if the policy is."""
    if is_sharding(accelerator):
        _plan_anew(accelerator)
        return shard_from_rank0(model, accelerator).eval()
    send_model(model, accelerator.device)
    return accelerator.prepare_model(model, evaluation_mode=True).eval()


def _plan_anew(accelerator: Accelerator) -> None:
    """Let the plan of sharding fit any model. It names the policy's layers, because the policy was prepared first."""
    plan = accelerator.state.fsdp_plugin
    plan.auto_wrap_policy, plan.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, None
    plan.reshard_after_forward = True


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model is sharded, also while its layers are gathered."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a shard (a collective); return other tensors unchanged."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def gather_tensors(named: Mapping[str, Weight], *, keep: bool) -> dict[str, Tensor]:
    """Return sharded tensors as a whole, in newly allocated host memory. Every rank calls it; ranks without
    `keep` get an empty dict."""

    def bring(_: str, tensor: Weight) -> Tensor:
        full = full_tensor(materialize(tensor))
        return full.to("cpu", copy=True) if keep else full.new_empty(0)

    weights = _map_distinct_tensors(named, bring)
    return weights if keep else {}


def gather_compute_weights(
    model: nn.Module, lm: Any, *, keep: bool, into: Mapping[str, Weight], as_named: AsNamed
) -> dict[str, Weight]:
    """Return the weights of `lm` inside the sharded `model` in the compute dtype and in host memory. Every rank calls it;
    ranks without `keep` get an empty dict.

    The weights of a layer are gathered together, which takes a tenth of the collectives. `into`: result of an earlier call,
    whose memory is used again, because pinned memory is slow to allocate. `as_named`: yields gathered weights under the names of the result.
    """

    def bring(name: str, weight: Weight) -> Weight:
        return _move_to_host(weight, into.get(name))

    # taken before layers are gathered, because FSDP2 builds state dicts of shards only
    saved = lm.state_dict(keep_vars=True)
    apart = {name: each for name, each in saved.items() if not isinstance(each, DTensor)}
    weights: dict[str, Weight] = _map_distinct_tensors(dict(as_named(apart)), bring) if keep else {}
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            if keep:
                named = lm.named_parameters(remove_duplicate=False)
                ready = {name: each for name, each in named if name in saved and not isinstance(each, DTensor)}
                weights |= _map_distinct_tensors(dict(as_named(ready)), bring)
            part.reshard()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {name: weights[name] for name, _ in as_named(saved)} if keep else {}


def _map_distinct_tensors(named: Mapping[str, Weight], bring: Callable[[str, Weight], Made]) -> dict[str, Made]:
    """Return name -> result of `bring`, which is called once for a tensor with several names (a tied head)."""
    places: dict[int, Made] = {}
    for name, tensor in named.items():
        if id(get_stored_tensor(tensor)) not in places:
            places[id(get_stored_tensor(tensor))] = bring(name, tensor)
    return {name: places[id(get_stored_tensor(tensor))] for name, tensor in named.items()}


def _move_to_host(weight: Weight, place: Weight | None) -> Weight:
    """Return the weight in host memory. `place`: earlier result of the same form, which is overwritten; None: allocate memory."""
    if not isinstance(weight, FolderWeight):
        assert place is None or isinstance(place, Tensor)
        return _copy_to_host(materialize(weight).detach().to(weight.dtype), place)
    before = (
        place
        if isinstance(place, FolderWeight)
        else FolderWeight(_copy_to_host(materialize(weight.base).detach(), None))
    )
    if weight.adapter is None:
        return before
    down, up = weight.adapter.down.float(), weight.adapter.up.float()
    kept = before.adapter
    return FolderWeight(
        before.base,
        LowRankUpdate(
            _copy_to_host(down, kept and kept.down), _copy_to_host(up, kept and kept.up), weight.adapter.scale
        ),
    )


def _copy_to_host(full: Tensor, place: Tensor | None) -> Tensor:
    """Copy a tensor to the host, into `place` if given, without waiting for the GPU."""
    if not full.is_cuda:
        return full.clone() if place is None else place.copy_(full)
    if place is None:
        place = torch.empty(full.shape, dtype=full.dtype, pin_memory=True)
    return place.copy_(full, non_blocking=True)


def gather_optimizer_state(optimizer: Any, *, keep: bool) -> dict[str, Any]:
    """Return the whole state of a sharded optimizer, as a single process would have it, in newly allocated host memory. Without
    `keep`, leave its tensors out. Every rank calls it."""
    saved: dict[str, Any] = optimizer.state_dict()
    whole_state: dict[int, dict[str, Any]] = {}
    for index, values in saved["state"].items():
        full = {name: full_tensor(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        whole_state[index] = (
            {name: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for name, v in full.items()} if keep else {}
        )
    return {**saved, "state": whole_state}
