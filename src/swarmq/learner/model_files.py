"""What of a trained model is written: taken from it between two steps, put on disk then or beside the steps that follow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from swarmq.config import Lora
from swarmq.learner import lora


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
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept.copy_(tensor)

    def of_optimizer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same of every tensor in what `Optimizer.state_dict` gave."""
        own = {
            index: {name: self.of(f"{index}.{name}", each) for name, each in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": own}


def optimizer_bytes(state: Mapping[str, Any]) -> int:
    """Of its tensors."""
    return sum(each.nbytes for values in state["state"].values() for each in values.values())
