"""LoRA: low-rank adapters (PEFT) are trained, the model they sit in is not.

Engines and checkpoints get the merged weights, W + s B A, under the model's own names: an engine serves them as it
serves full weights, and a checkpoint loads without PEFT. The adapters alone lie beside it, and are what travels to engines that
merge for themselves (weights/format/adapters.py).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmq.config import Lora
from swarmq.errors import SetUpError
from swarmq.learner.model.hf_names import as_in_folder
from swarmq.learner.store.records import ADAPTER_FILE, ADAPTER_SETTINGS_KEY
from swarmq.weights.format.packing import Adapter, Deferred, FromFolder, Weight

NAME = "default"
MARK = ".lora_"
WRAPPED = ".base_layer"


def add_lora(lm: Any, lora: Lora) -> None:
    """Freeze `lm` and put fresh FP32 adapters into it, which add nothing yet. Raises LearnerError."""
    if lora.modules is not None:
        _check_modules(lm, lora.modules)
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
        raise SetUpError(f"train.lora: {error}") from error
    for name, parameter in lm.named_parameters():
        if MARK in name:
            parameter.data = parameter.data.float()  # PEFT makes them of the model's type


def _check_modules(lm: Any, modules: Collection[str]) -> None:
    """Raises LearnerError for names that no layer has: PEFT passes over them if it knows one. Nor can adapters be at the ends of
    the model: its head is computed otherwise, and its weights may be those of the embedding."""
    ends = {lm.get_input_embeddings(), lm.get_output_embeddings()}
    not_these = {name.rpartition(".")[2] for name, module in lm.named_modules() if module in ends}
    matrices = (name for name, tensor in as_in_folder(lm, lm.state_dict().items()) if len(tensor.shape) == 2)
    layers = [name.removesuffix(".weight") for name in matrices]
    layers = [name for name in layers if name.rpartition(".")[2] not in not_these]
    for wanted in modules:
        if not any(f".{name}".endswith(f".{wanted}") for name in layers):
            choices = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise SetUpError(
                f"train.lora.modules: this model has no layer {wanted!r} that takes adapters; it has {choices}"
            )


def load_adapter(lm: Any, folder: Path) -> None:
    """Those that `save_adapter` wrote there, into a model with the same ones."""
    lm.load_state_dict(load_file(folder / ADAPTER_FILE), strict=False)


@contextlib.contextmanager
def without_adapters(lm: Any) -> Iterator[None]:
    """`lm` is the model that adapters were put into. They are on again afterwards.

    PEFT's own switch also says what requires a gradient: of the parameters that are there, which where ranks share them out are
    others from moment to moment."""
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    _switch(layers, off=True)
    try:
        yield
    finally:
        _switch(layers, off=False)


def _switch(layers: Iterable[Any], *, off: bool) -> None:
    for layer in layers:
        layer._disable_adapters = off  # noqa: SLF001 - what `disable_adapters` tells


def deferred(lm: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Weight]]:
    """These `weights` of the model under its own names, with what adapters add: that is computed when the tensor is asked for, and
    told apart from what it is added to. Where ranks share out both, they ask for it together."""
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    frozen = {name for name, each in lm.named_parameters(remove_duplicate=False) if not each.requires_grad}
    for name, tensor in weights.items():
        if MARK in name:
            continue
        layer, plain = _layer_of(name, layers), name.replace(WRAPPED, "")
        if layer is not None:
            yield plain, _adapted(tensor, layer)
        else:
            yield plain, FromFolder(tensor) if name in frozen else tensor.detach()


def _adapted(weight: Tensor, layer: Any) -> Weight:
    """Only what a plain linear layer's adapter adds is two matrices and a factor: not what stacked experts' do, or a turned layer's."""
    if type(layer) is not Linear or layer.fan_in_fan_out:
        return Deferred(weight.shape, torch.float32, weight.device, partial(_sum, weight, layer))
    down, up = (each[NAME].weight.detach() for each in (layer.lora_A, layer.lora_B))
    return FromFolder(weight, Adapter(down, up, float(layer.scaling[NAME])))


def _layer_of(name: str, layers: Mapping[str, LoraLayer]) -> LoraLayer | None:
    """Stacked experts have several tensors in a module, and an adapter around it for each, one in the other."""
    owner, _, leaf = name.rpartition(".")
    while owner.endswith(WRAPPED):
        owner = owner.removesuffix(WRAPPED)
        if owner in layers and getattr(layers[owner], "parameter_name", "weight") == leaf:
            return layers[owner]
    return None


def _sum(weight: Tensor, layer: Any) -> Tensor:
    """In FP32, whatever the weight is kept in."""
    with torch.no_grad():
        whole: Tensor = weight.float() + layer.get_delta_weight(NAME).float()
    return whole


def adapters(lm: Any) -> dict[str, Tensor]:
    """By the names that `load_adapter` knows."""
    return {name: value for name, value in lm.state_dict().items() if MARK in name}


def save_adapter(adapters: Mapping[str, Tensor], lora: Lora, folder: Path) -> None:
    """Write them, and how they were made, into a folder beside the merged weights."""
    (folder / ADAPTER_FILE).parent.mkdir(exist_ok=True)
    kept = {name: value.contiguous() for name, value in adapters.items()}
    save_file(kept, folder / ADAPTER_FILE, metadata={ADAPTER_SETTINGS_KEY: msgspec.json.encode(lora).decode()})
