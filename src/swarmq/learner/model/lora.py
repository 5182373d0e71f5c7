"""LoRA: low-rank adapters (PEFT) that are trained in place of the model's weights.

Engines and checkpoints get the merged weights, W + s B A, under the model's own names: an engine serves them like full weights,
and a checkpoint loads without PEFT. The adapters themselves are stored beside the checkpoint's weights, and are sent to engines
that merge adapters by themselves (weights/format/adapter_file.py).

PEFT is imported where a model has adapters: its import takes seconds, which a learner of all weights need not spend.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmq.config import Lora
from swarmq.errors import SetUpError
from swarmq.learner.model.hf_names import to_hf_names
from swarmq.learner.store.records import ADAPTER_FILE, ADAPTER_SETTINGS_KEY
from swarmq.weights.format.packing import FolderWeight, LazyTensor, LowRankUpdate, Weight

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

NAME = "default"
MARK = ".lora_"
WRAPPED = ".base_layer"


def add_lora(lm: Any, lora: Lora) -> None:
    """Freeze `lm` and add fresh FP32 adapters, which change nothing yet. Raises LearnerError if the model cannot have adapters."""
    from peft import LoraConfig  # noqa: PLC0415

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
            # PEFT sets a rank for stacked experts itself, then warns that it finds no such module
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
            lm.add_adapter(config, adapter_name=NAME)
    except ValueError as error:
        raise SetUpError(f"train.lora: {error}") from error
    for name, parameter in lm.named_parameters():
        if MARK in name:
            parameter.data = parameter.data.float()  # PEFT creates adapters in the model's dtype


def _check_modules(lm: Any, modules: Collection[str]) -> None:
    """Raise LearnerError for names that no layer has, and for the embedding and the head.

    PEFT ignores an unknown name beside a known one. The head is computed separately and may be tied to the embedding.
    """
    ends = {lm.get_input_embeddings(), lm.get_output_embeddings()}
    not_these = {name.rpartition(".")[2] for name, module in lm.named_modules() if module in ends}
    matrices = (name for name, tensor in to_hf_names(lm, lm.state_dict().items()) if len(tensor.shape) == 2)
    layers = [name.removesuffix(".weight") for name in matrices]
    layers = [name for name in layers if name.rpartition(".")[2] not in not_these]
    for wanted in modules:
        if not any(f".{name}".endswith(f".{wanted}") for name in layers):
            choices = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise SetUpError(
                f"train.lora.modules: this model has no layer {wanted!r} that takes adapters; it has {choices}"
            )


def load_adapter(lm: Any, folder: Path) -> None:
    """Load adapters written by `save_adapter` into a model that has adapters of the same names and shapes."""
    lm.load_state_dict(load_file(folder / ADAPTER_FILE), strict=False)


@contextlib.contextmanager
def without_adapters(lm: Any) -> Iterator[None]:
    """Switch the adapters of `lm` off inside the block.

    PEFT's own switch also changes which parameters require a gradient, which fails if ranks shard the model, because parameter
    objects are replaced when layers are gathered.
    """
    layers = _find_layers(lm).values()
    _set_disabled(layers, off=True)
    try:
        yield
    finally:
        _set_disabled(layers, off=False)


def _set_disabled(layers: Iterable[Any], *, off: bool) -> None:
    for layer in layers:
        layer._disable_adapters = off  # noqa: SLF001 - the value of the property `disable_adapters`


def defer_adapted_weights(lm: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Weight]]:
    """Yield `weights` under the model's own names. The adapters' contribution is kept separate from the base, and added when a
    tensor is requested. If ranks shard the weights, all ranks must request the same tensor at the same time."""
    layers = _find_layers(lm)
    frozen = {name for name, each in lm.named_parameters(remove_duplicate=False) if not each.requires_grad}
    for name, tensor in weights.items():
        if MARK in name:
            continue
        layer, plain = _find_layer(name, layers), name.replace(WRAPPED, "")
        if layer is not None:
            yield plain, _adapt_weight(tensor, layer)
        else:
            yield plain, FolderWeight(tensor) if name in frozen else tensor.detach()


def _adapt_weight(weight: Tensor, layer: Any) -> Weight:
    """Return a weight with its adapter. In a plain linear layer the two are kept separate. Adapters of stacked experts and of
    transposed layers have another form, so they are merged when the weight is requested."""
    from peft.tuners.lora import Linear  # noqa: PLC0415

    if type(layer) is not Linear or layer.fan_in_fan_out:
        return LazyTensor(weight.shape, torch.float32, weight.device, partial(_merge_weight, weight, layer))
    down, up = (each[NAME].weight.detach() for each in (layer.lora_A, layer.lora_B))
    return FolderWeight(weight, LowRankUpdate(down, up, float(layer.scaling[NAME])))


def _find_layers(lm: Any) -> dict[str, LoraLayer]:
    """Return the adapter layers of `lm` by name."""
    if not any(MARK in name for name, _ in lm.named_parameters()):
        return {}
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    return {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}


def _find_layer(name: str, layers: Mapping[str, LoraLayer]) -> LoraLayer | None:
    """Return the adapter layer of a weight. Stacked experts have several tensors in a module, with nested adapters around them."""
    owner, _, leaf = name.rpartition(".")
    while owner.endswith(WRAPPED):
        owner = owner.removesuffix(WRAPPED)
        if owner in layers and getattr(layers[owner], "parameter_name", "weight") == leaf:
            return layers[owner]
    return None


def _merge_weight(weight: Tensor, layer: Any) -> Tensor:
    """Return base plus adapter in FP32, whatever the weight's dtype."""
    with torch.no_grad():
        whole: Tensor = weight.float() + layer.get_delta_weight(NAME).float()
    return whole


def get_adapters(lm: Any) -> dict[str, Tensor]:
    """Return the adapters by the names that `load_adapter` knows."""
    return {name: value for name, value in lm.state_dict().items() if MARK in name}


def save_adapter(adapters: Mapping[str, Tensor], lora: Lora, folder: Path) -> None:
    """Write adapters and their settings into a folder beside the merged weights."""
    (folder / ADAPTER_FILE).parent.mkdir(exist_ok=True)
    kept = {name: value.contiguous() for name, value in adapters.items()}
    save_file(kept, folder / ADAPTER_FILE, metadata={ADAPTER_SETTINGS_KEY: msgspec.json.encode(lora).decode()})
