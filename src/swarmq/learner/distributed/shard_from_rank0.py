"""Sharding of a model that only rank 0 has loaded, so that host memory holds the model once, whatever the number of ranks.

  rank 0   loaded, then emptied --FSDP2--> shards without values <--scatter, tensor by tensor-- loaded values
  others   empty from the start --^

accelerate's own method (`cpu_ram_efficient_loading`) is not used: it fills host memory with zeros on every rank to identify
parameters, unties tied weights of wrapped models, and ignores saved buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from swarmq.errors import LearnerError
from swarmq.learner.model.attention_check import broadcast_from_rank0


class TensorOutline(NamedTuple):
    """Name, shape and kind of a tensor, without its values."""

    first: str
    """First name of the tensor; a tied weight has several names."""
    shape: torch.Size
    dtype: torch.dtype
    trained: bool | None
    """Whether the tensor is a trained parameter; None for a buffer."""


def shard_from_rank0(model: nn.Module, accelerator: Accelerator) -> Any:
    """Return the model with this rank's shards of rank 0's values. Other ranks pass the model on the meta device. Every rank
    calls it.

    Raises LearnerError if the ranks' models differ in structure.
    """
    ours = outline_tensors(model)
    outlines = broadcast_from_rank0(ours)
    check_alike(ours, outlines)
    values = {} if on_meta(model) else {name: each.detach() for name, each in _named(model, once=True)}
    _make_empty(model, outlines)
    sharded = fsdp2_prepare_model(accelerator, model)
    _fill(sharded, outlines, values, accelerator)
    return sharded


def on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def outline_tensors(model: nn.Module) -> dict[str, TensorOutline]:
    """Return name -> outline (shape, dtype) of all parameters and buffers; a tied tensor is there under each of its names."""
    first: dict[int, str] = {}
    return {
        name: TensorOutline(
            first.setdefault(id(each), name),
            each.shape,
            each.dtype,
            each.requires_grad if isinstance(each, nn.Parameter) else None,
        )
        for name, each in _named(model)
    }


def _named(model: nn.Module, *, once: bool = False) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=once)
    yield from model.named_buffers(remove_duplicate=once)


def check_alike(ours: dict[str, TensorOutline], outlines: dict[str, TensorOutline]) -> None:
    """Raise LearnerError if this rank's model and rank 0's have different tensors."""
    if different := sorted(ours.keys() ^ outlines.keys()):
        raise LearnerError(
            f"the model's weights differ from those that its config.json describes: only one of them has {different[0]} (and "
            f"{len(different) - 1} more), so rank 0 cannot send it to the other ranks: repair its folder"
        )


def _make_empty(model: nn.Module, outlines: dict[str, TensorOutline]) -> None:
    """Replace all tensors by tensors without values, tied as on rank 0."""
    made: dict[str, Tensor] = {}
    for name, one in outlines.items():
        if one.first not in made:
            empty = torch.empty(one.shape, dtype=one.dtype, device="meta")
            made[one.first] = empty if one.trained is None else nn.Parameter(empty, requires_grad=one.trained)
        put_tensor(model, name, made[one.first])


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer `name` of the model by `tensor`."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, tensor)


def _fill(
    model: nn.Module, outlines: dict[str, TensorOutline], values: dict[str, Tensor], accelerator: Accelerator
) -> None:
    """Fill the shards with rank 0's values, in place, because FSDP2 keeps references to its parameters. Rank 0 frees each value
    once it is sent."""
    offloaded = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = prepare_source(values.pop(name, None), outlines[name], accelerator.device)
        shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=0)
        kept = nn.Parameter(shard.cpu() if offloaded else shard, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, kept)  # type: ignore[no-untyped-call]
    buffers = {name: one for name, one in outlines.items() if one.trained is None}
    made: dict[str, Tensor] = {}
    for name, one in buffers.items():
        if one.first not in made:
            made[one.first] = prepare_source(values.pop(name, None), one, accelerator.device)
            torch.distributed.broadcast(made[one.first], src=0)
        put_tensor(model, name, made[one.first])


def prepare_source(value: Tensor | None, one: TensorOutline, device: torch.device) -> Tensor:
    """Return a tensor on the device: on rank 0 the value, on other ranks an empty tensor to receive it."""
    return torch.empty(one.shape, dtype=one.dtype, device=device) if value is None else value.to(device).contiguous()
