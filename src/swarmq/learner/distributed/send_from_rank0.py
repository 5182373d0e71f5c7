"""Sends models, small files and optimizer state from rank 0 to the other ranks, whose hosts may have neither run folder nor model;
and gathers values on rank 0.

Weights of sharded models are sent by `shard_from_rank0`.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from swarmq.learner.distributed.processes import is_main
from swarmq.learner.distributed.shard_from_rank0 import check_alike, outline_tensors, prepare_source, put_tensor
from swarmq.learner.memory.model_copies import copy_tokenizer, register_copy
from swarmq.learner.memory.outline import load_config
from swarmq.learner.memory.ranks import num_ranks
from swarmq.learner.model.attention_check import broadcast_from_rank0

T = TypeVar("T")

_copies: list[tempfile.TemporaryDirectory[str]] = []
"""Folders with copies of rank 0's files on this rank; they are removed when the process ends."""


@functools.cache
def send_model_files(source: str) -> None:
    """Send configuration and tokenizer of rank 0's model `source` to the other ranks, at the first call for it. Every rank calls it.

    Raises LearnerError, on rank 0, if there is no such model.
    """
    if num_ranks() == 1:
        return
    files = broadcast_from_rank0(_read_files(source) if is_main() else {})
    if is_main():
        return
    _copies.append(tempfile.TemporaryDirectory(prefix="swarmq-model-"))
    for name, content in files.items():
        (Path(_copies[-1].name) / name).write_bytes(content)
    register_copy(source, _copies[-1].name)


def _read_files(source: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        load_config(source).save_pretrained(folder)
        with contextlib.suppress(OSError, ValueError):  # a model may have no tokenizer
            copy_tokenizer(source, Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def send_model(model: nn.Module, device: torch.device) -> None:
    """Move rank 0's whole model to `device`, and send it to the other ranks. `model`: on ranks other than 0, the same model on the
    meta device. Every rank calls it.

    Raises LearnerError if the ranks' models differ in structure.
    """
    if num_ranks() == 1:
        return
    if is_main():
        model.to(device)
    ours = outline_tensors(model)
    outlines = broadcast_from_rank0(ours)
    check_alike(ours, outlines)
    values = {} if not is_main() else {**dict(model.named_parameters()), **dict(model.named_buffers())}
    received: dict[str, Tensor] = {}
    for name, one in outlines.items():
        if one.first not in received:
            whole = prepare_source(values[name].detach() if values else None, one, device)
            torch.distributed.broadcast(whole, src=0)
            received[name] = whole if one.trained is None else nn.Parameter(whole, requires_grad=one.trained)
        if not values:
            put_tensor(model, name, received[one.first])


def gather_on_rank0(values: Sequence[T]) -> list[T]:
    """Return, on rank 0, the values of all ranks in the order of the ranks; an empty list on other ranks. Every rank calls it."""
    if num_ranks() == 1:
        return list(values)
    gathered: list[Any] | None = [None] * num_ranks() if is_main() else None
    torch.distributed.gather_object(list(values), gathered)
    return [value for each in gathered or () for value in each]


class _Outline(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def send_optimizer_state(optimizer: Any, saved: Mapping[str, Any] | None, device: torch.device) -> None:
    """Load the state that rank 0 has read from a checkpoint into every rank's optimizer; with sharded parameters, load this rank's
    part. Every rank calls it.

    `saved`: on rank 0, the state of a single process; None on other ranks. `device`: device of tensors in collectives.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = saved["state"] if saved else {}
    outlines = {index: {name: _outline(value) for name, value in each.items()} for index, each in values.items()}
    outline = broadcast_from_rank0({**(saved or {}), "state": outlines})
    state = {
        index: {
            name: _receive(values[index][name] if saved else None, one, parameters[index], device)
            for name, one in each.items()
        }
        for index, each in outline["state"].items()
    }
    optimizer.load_state_dict({**outline, "state": state})


def _outline(value: Any) -> Any:
    return _Outline(value.shape, value.dtype) if isinstance(value, Tensor) else value


def _receive(value: Any, one: Any, parameter: Tensor, device: torch.device) -> Any:
    """Return this rank's shard of a tensor that belongs to a sharded parameter; return every other value, such as the step count,
    whole."""
    if not isinstance(one, _Outline):
        return one
    whole = torch.empty(one.shape, dtype=one.dtype, device=device) if value is None else value.to(device)
    if isinstance(parameter, DTensor) and one.shape == parameter.shape:
        part: Tensor = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=0)
    else:
        part = whole
        if num_ranks() > 1:
            torch.distributed.broadcast(part, src=0)
    return part.to(parameter.device)
