"""What of a trained model is written: taken from it between two steps, put on disk then or beside the steps that follow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_with_path

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

    def of_all(self, state: Any) -> Any:
        """The same of every tensor in lists and dicts."""
        return tree_map_with_path(
            lambda path, each: self.of(str(path), each) if isinstance(each, Tensor) else each, state
        )


def size_bytes(state: Any) -> int:
    """Of all tensors in lists and dicts."""
    return sum(each.nbytes for each in tree_leaves(state) if isinstance(each, Tensor))
