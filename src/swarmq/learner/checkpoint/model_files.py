"""The files of a trained model, copied between two steps and written at once or while the next steps run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from swarmq.config import Lora
from swarmq.learner.memory import host
from swarmq.learner.model import lora
from swarmq.weights.format.packing import NamedTensors


class Adapters(NamedTuple):
    tensors: Mapping[str, Tensor]
    """Adapters by the names that `lora.load_adapter` knows."""
    settings: Lora


class ModelFiles(NamedTuple):
    """Content of a folder that `from_pretrained` loads."""

    weights: dict[str, Tensor]
    """Weights by the names of the model's folder, in host memory."""
    configs: tuple[Any, ...]
    """Configurations of transformers: model and generation; the latter may name further end tokens."""
    adapters: Adapters | None

    def write(self, folder: Path) -> None:
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        for config in self.configs:
            config.save_pretrained(folder)
        if self.adapters:
            lora.save_adapter(self.adapters.tensors, self.adapters.settings, folder)


CopyOutline = tuple[str, torch.Size, torch.dtype]
"""(unique name, shape, dtype) of a tensor."""


class NotGrantedError(Exception):
    """The system does not grant this process more memory."""


class HostCopies:
    """Copies of tensors in host memory, which stay unchanged while training goes on.

    Their memory is kept for later copies, because allocating it takes longer than filling it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept.values())

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor, valid until the next copy of the same name."""
        self.reserve([(name, tensor.shape, tensor.dtype)])
        return self._kept[name].copy_(tensor)

    def of_optimizer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of everything in an `Optimizer.state_dict`."""
        own = {
            index: {
                name: self.of(_moment_name(index, name), each) if isinstance(each, Tensor) else copy.deepcopy(each)
                for name, each in values.items()
            }
            for index, values in state["state"].items()
        }
        return {**state, "state": own}

    def reserve(self, outlines: Iterable[CopyOutline]) -> None:
        """Allocate memory for copies and touch it, because the kernel provides granted memory only at the first write.

        Raises NotGrantedError if the memory is not granted; all kept memory is then freed, because training needs it.
        """
        for name, shape, dtype in outlines:
            kept = self._kept.get(name)
            if kept is None or (kept.shape, kept.dtype) != (shape, dtype):
                self._kept.pop(name, None)
                self._kept[name] = self._empty(shape, dtype).zero_()

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:
            if not host.is_out_of_memory(error):
                raise
            self._kept.clear()
            raise NotGrantedError(f"the system grants no memory for a copy: {str(error).splitlines()[0]}") from error


def outline_copies(weights: NamedTensors, state: Mapping[str, Any]) -> list[CopyOutline]:
    """Return outlines of a model's weights and an `Optimizer.state_dict`, named as in `HostCopies`."""
    moments = [
        (_moment_name(index, name), each)
        for index, values in state["state"].items()
        for name, each in values.items()
        if isinstance(each, Tensor)
    ]
    return [(name, each.shape, each.dtype) for name, each in (*weights, *moments)]


def num_bytes(outlines: Iterable[CopyOutline]) -> int:
    return sum(shape.numel() * dtype.itemsize for _, shape, dtype in outlines)


def _moment_name(index: int, name: str) -> str:
    """Return the name of an optimizer moment, from the index of its parameter."""
    return f"{index}.{name}"
