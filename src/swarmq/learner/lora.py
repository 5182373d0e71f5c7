"""LoRA: low-rank adapters (PEFT) are trained, the model they sit in is not.

Engines and checkpoints get the merged weights, W + s B A, under the model's own names: an engine serves them as it
serves full weights, by any way of pushing, and a checkpoint loads without PEFT. The adapters alone lie beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
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

ADAPTER = Path("adapter", "adapter.safetensors")
"""In a checkpoint. Of all safetensors files beside a model's, vLLM believes that they are the model's."""
NAME = "default"
MARK = ".lora_"
WRAPPED = ".base_layer"


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
        with warnings.catch_warnings():
            # the rank that PEFT itself gives to stacked experts it then misses among modules
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
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
        if MARK in name:
            continue
        layer, plain = _adapter_of(name, layers), name.replace(WRAPPED, "")
        if layer is None:
            yield plain, tensor.detach()
        else:
            yield plain, Deferred(tensor.shape, tensor.dtype, tensor.device, partial(_sum, tensor, layer))


def _adapter_of(name: str, layers: Mapping[str, LoraLayer]) -> LoraLayer | None:
    """Stacked experts have several tensors in a module, and an adapter around it for each, one in the other."""
    owner, _, leaf = name.rpartition(".")
    while owner.endswith(WRAPPED):
        owner = owner.removesuffix(WRAPPED)
        if owner in layers and getattr(layers[owner], "parameter_name", "weight") == leaf:
            return layers[owner]
    return None


def _sum(weight: Tensor, layer: Any) -> Tensor:
    with torch.no_grad():
        whole: Tensor = weight + layer.get_delta_weight(NAME)
    return whole


def save_adapter(lm: Any, folder: Path) -> None:
    """Write the adapters into a folder beside the merged weights."""
    (folder / ADAPTER).parent.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in lm.state_dict().items() if MARK in name}, folder / ADAPTER)
