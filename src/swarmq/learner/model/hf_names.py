"""Names and shapes of weights as in the model's Hugging Face folder, which engines and checkpoints expect.

transformers holds some weights under other names or in another form, such as a layer's experts stacked in one tensor, and
provides the reverse mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from swarmq.weights.format.packing import FolderWeight, LazyTensor, NamedTensors, Weight, get_stored_tensor, materialize

Sources = dict[str, Weight]


def to_hf_names(lm: Any, named: NamedTensors) -> Iterator[tuple[str, Weight]]:
    """Yield the tensors `named`, under the names and with the shapes of the folder from which `lm` was loaded.

    Tensors to split or merge are computed when they are requested; all others are passed on unchanged.
    """
    together: dict[tuple[str, ...], Sources] = {}
    for name, tensor in named:
        parts = _revert_names(lm, {name: _make_outline(tensor)})
        together.setdefault(tuple(parts), {})[name] = tensor
    for sources in together.values():
        yield from _revert_group(lm, sources)


def _revert_group(lm: Any, sources: Sources) -> Iterator[tuple[str, Weight]]:
    outlines = {name: _make_outline(tensor) for name, tensor in sources.items()}
    known, some = {id(outline): sources[name] for name, outline in outlines.items()}, next(iter(sources.values()))
    apart, bases = SplitTensors(lm, sources), [get_stored_tensor(tensor) for tensor in sources.values()]
    unchanged = all(base is not tensor for base, tensor in zip(bases, sources.values(), strict=True))
    tensors = tuple(base for base in bases if isinstance(base, Tensor))
    for name, part in _revert_names(lm, outlines).items():
        if id(part) in known:
            yield name, known[id(part)]
        else:
            one = LazyTensor(part.shape, part.dtype, some.device, partial(apart.part, name))
            yield name, FolderWeight(one._replace(sources=tensors)) if unchanged else one


class SplitTensors:
    """Tensors that are split or merged. All parts are computed when the first is requested, and freed after the last."""

    def __init__(self, lm: Any, sources: Sources) -> None:
        self._lm, self._sources = lm, sources
        self._parts: dict[str, Tensor] = {}

    def part(self, name: str) -> Tensor:
        if name not in self._parts:
            self._parts = _revert_names(self._lm, {name: materialize(tensor) for name, tensor in self._sources.items()})
        return self._parts.pop(name)


def _revert_names(lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = revert_weight_conversion(lm, dict(tensors))
    return parts


def _make_outline(tensor: Weight) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
