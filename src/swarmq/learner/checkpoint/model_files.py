"""What of a trained model is written: taken from it between two steps, put on disk then or beside the steps that follow."""

from __future__ import annotations

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
    """By the names that `lora.load_adapter` knows."""
    settings: Lora


class ModelFiles(NamedTuple):
    """What `from_pretrained` loads."""

    weights: dict[str, Tensor]
    """By the names that the model's folder has, in host memory."""
    configs: tuple[Any, ...]
    """transformers': the model's, and that of generation, which may name more ends of an answer."""
    adapters: Adapters | None

    def write(self, folder: Path) -> None:
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        for config in self.configs:
            config.save_pretrained(folder)
        if self.adapters:
            lora.save_adapter(self.adapters.tensors, self.adapters.settings, folder)


Outline = tuple[str, torch.Size, torch.dtype]
"""Of a tensor: its name, which nothing else has, and what it is like."""


class NotGrantedError(Exception):
    """The system gives this process no more memory; the message says so."""


class HostCopies:
    """Tensors in host memory that stay what they are while training goes on.

    Their memory is kept for the next ones: getting as much anew takes longer than filling it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept.values())

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """A copy, until the next of that name is asked for."""
        self.reserve([(name, tensor.shape, tensor.dtype)])
        return self._kept[name].copy_(tensor)

    def of_optimizer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same of every tensor in what `Optimizer.state_dict` gave."""
        own = {
            index: {name: self.of(_moment(index, name), each) for name, each in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": own}

    def reserve(self, outlines: Iterable[Outline]) -> None:
        """Get memory for copies now, all of it: a kernel gives what it promised when it is written to, and takes its time.

        Raises NotGrantedError when it promises none; all that is kept is given back then, for training needs it more.
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
            if not host.refuses(error):
                raise
            self._kept.clear()
            raise NotGrantedError(f"the system grants no memory for a copy: {str(error).splitlines()[0]}") from error


def outlines(weights: NamedTensors, state: Mapping[str, Any]) -> list[Outline]:
    """Of a model's weights and of what `Optimizer.state_dict` gave: what `HostCopies` holds of them."""
    moments = [
        (_moment(index, name), each) for index, values in state["state"].items() for name, each in values.items()
    ]
    return [(name, each.shape, each.dtype) for name, each in (*weights, *moments)]


def num_bytes(outlines: Iterable[Outline]) -> int:
    return sum(shape.numel() * dtype.itemsize for _, shape, dtype in outlines)


def _moment(index: int, name: str) -> str:
    """Of a parameter, by its number."""
    return f"{index}.{name}"
