"""Loading of the policy: any causal LM of transformers, ready for training."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from swarmq.errors import SetUpError
from swarmq.learner.memory.outline import build_outline, explain_errors, get_auto_class, load_config
from swarmq.learner.model import vision
from swarmq.learner.model.activation_checkpointing import ActivationCheckpointing

LAYER = re.compile(r"(.*?)\.(\d+)\.")
"""Pattern of a weight's name: the container of the layers, and the number of the layer."""


def load_lm(
    source: str, *, gradient_checkpointing: bool, empty: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """Load the causal LM `source` (a folder or name) with weights of `dtype`, and disable dropout and noise, because engines have
    none.

    `empty`: load it on the meta device, for a rank that gets its shards from rank 0. Raises LearnerError if there is no such
    model, or if it cannot be trained.
    """
    config = load_config(source)
    _disable_dropout(config)
    disable_progress_bar()
    lm = build_outline(source, config, dtype)
    if not empty:
        lm = _load_weights(source, config, dtype)
    lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif any("jitter" in name for name in vars(module)):
            # a router that adds noise or draws random experts in training
            module.training = False
    if gradient_checkpointing:
        ActivationCheckpointing.enable(lm)
    if vision.takes_images(config):
        vision.set_input_norm(lm, source)
    return lm


def _load_weights(source: str, config: Any, dtype: torch.dtype) -> Any:
    """Load the model with its weights. Raises LearnerError if that fails or if the files do not match the configuration,
    because missing weights would be random."""
    instead = "fetch its files again, all of them"
    if getattr(config, "quantization_config", None):
        instead = "use the model with weights that are not quantised"
    with explain_errors(source, "its weights cannot be loaded", instead):
        lm, found = get_auto_class(config).from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    wrong = {
        "missing": found["missing_keys"],
        "of another shape": {name for name, *_ in found["mismatched_keys"]},
        "of layers that it does not have": _find_extra_layers(lm, found["unexpected_keys"]),
    }
    if differences := "; ".join(f"{what}: {_abbreviate(names)}" for what, names in wrong.items() if names):
        raise SetUpError(
            f"model {source}: its weights are not those that its config.json describes ({differences}); fetch its files again, "
            "all of them, or correct config.json"
        )
    return lm


def _find_extra_layers(lm: Any, unexpected: Iterable[str]) -> set[str]:
    """Return the unexpected weights of layers that the model lacks. Other unexpected weights are harmless: those of vision towers
    and multi-token prediction heads, and constants in old files."""
    decoder = f"{lm.base_model_prefix}."  # names lack this prefix if the folder holds the decoder only

    def place(name: str) -> tuple[str, int]:
        found = LAYER.match(name.removeprefix(decoder))
        return (found[1], int(found[2])) if found else ("", -1)

    last = dict(sorted(place(name) for name, _ in lm.named_parameters()))
    # layers for multi-token prediction are stored after the others, under the same name pattern
    ahead = getattr(lm.config, "num_nextn_predict_layers", None) or 0
    return {name for name in unexpected if place(name)[1] > last.get(place(name)[0], math.inf) + ahead}


def _abbreviate(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _disable_dropout(config: Any) -> None:
    """Set dropout in the configuration to 0, because layers apply it with the values from their construction
    (`attention_dropout`, `resid_pdrop`, `layerdrop` and similar)."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).copy().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def get_vocab_size(lm: Any) -> int:
    return int(lm.get_input_embeddings().weight.shape[0])
