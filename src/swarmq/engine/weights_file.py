"""Runs inside vLLM: loads one safetensors file that the learner wrote into the model being served.

The file lies in shared memory when learner and engine share a host, else on a disk that both see; so this works
without a GPU and between hosts, and a learner that dies leaves nothing behind in the engine. Everything that can be
wrong with a file is found before the model is touched, and the model is changed in one call, so between two calls of
the learner the weights are always whole: the old ones or the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from swarmq.engine.weights_plugin import UNTOUCHED

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"

Shape = tuple[int, ...]


@dataclass
class NoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A file needs no rendezvous."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the weights lie, in checkpoint format: Hugging Face's names and shapes, the whole model."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[NoInitInfo, FileUpdateInfo]):  # type: ignore[misc]
    """One worker's side of a push."""

    init_info_cls = NoInitInfo
    update_info_cls = FileUpdateInfo
    _expected: dict[str, Shape] | None = None

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class would synchronize an accelerator, which a CPU is not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Read all, check all, load all. Raises ValueError before the model is touched."""
        tensors = self._read(update_info.path)
        self._check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, update_info.path)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._with_head(tensors))
        finalize_layerwise_reload(self.model, self.model_config)

    def _read(self, path: str) -> dict[str, torch.Tensor]:
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except Exception as error:
            raise ValueError(f"{path} is not readable as safetensors, {UNTOUCHED}: {error}") from error

    def _check(self, shapes: dict[str, Shape], path: str) -> None:
        """Compare with the checkpoint being served, where that is a folder here (a hub name is not looked up)."""
        if self._expected is None:
            self._expected = _checkpoint_shapes(Path(self.model_config.model))
            if self._tied:
                self._expected.pop(HEAD, None)
        missing = sorted(self._expected.keys() - shapes.keys())
        changed = sorted(name for name, shape in self._expected.items() if shapes.get(name, shape) != shape)
        if missing or changed:
            what = f"lacks {missing[:3]}" if missing else f"has other shapes for {changed[:3]}"
            raise ValueError(f"{path} is not of the served model, {UNTOUCHED}: it {what}")

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _with_head(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """On a CPU the head is a packed copy of the embedding: though tied, it must be loaded as well."""
        yield from tensors.items()
        if HEAD not in tensors and self._tied:
            yield from ((HEAD, tensor) for name, tensor in tensors.items() if name.endswith(EMBEDDING))


def _checkpoint_shapes(folder: Path) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
