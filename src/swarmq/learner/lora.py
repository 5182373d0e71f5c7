"""LoRA: low-rank adapters (PEFT) are trained, the model they sit in is not.

Engines and checkpoints get the merged weights, W + s B A, under the model's own names: an engine serves them as it
serves full weights, by any way of pushing, and a checkpoint loads without PEFT. The adapters alone lie beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmq.config import Lora
from swarmq.engine.packing import Deferred, made
from swarmq.errors import LearnerError

ADAPTER = "adapter.safetensors"
NAME = "default"
MARK = ".lora_"


def add_lora(lm: Any, lora: Lora, source: str) -> None:
    """Freeze `lm` and put adapters into it, those in the folder `source` if it has any. Raises LearnerError."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules="all-linear" if lora.modules is None else list(lora.modules),
        task_type="CAUSAL_LM",
    )
    try:
        lm.add_adapter(config, adapter_name=NAME)
    except ValueError as error:
        raise LearnerError(f"train.lora: {error}") from error
    if (file := Path(source) / ADAPTER).is_file():
        unknown = lm.load_state_dict(load_file(file), strict=False).unexpected_keys
        if unknown:
            raise LearnerError(f"{file}: adapters of another shape or model: {unknown[0]}; train.lora has changed")


def has_lora(lm: Any) -> bool:
    return any(isinstance(module, LoraLayer) for module in lm.modules())


def merged(lm: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model under its own name, with what its adapter adds."""
    return ((name, made(tensor)) for name, tensor in deferred(lm))


def deferred(lm: Any) -> Iterator[tuple[str, Tensor | Deferred]]:
    """The same; what adapters add is computed when the tensor is asked for."""
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in lm.state_dict().items():
        owner = name.removesuffix(".base_layer.weight")
        if owner in layers and owner != name:
            yield f"{owner}.weight", Deferred(tensor.shape, tensor.dtype, partial(_sum, tensor, layers[owner]))
        elif MARK not in name:
            yield name.replace(".base_layer.", "."), tensor.detach()


def _sum(weight: Tensor, layer: Any) -> Tensor:
    with torch.no_grad():
        whole: Tensor = weight + layer.get_delta_weight(NAME)
    return whole


def save_adapter(lm: Any, folder: Path) -> None:
    """Write the adapters beside the merged weights."""
    save_file({name: value.contiguous() for name, value in lm.state_dict().items() if MARK in name}, folder / ADAPTER)
