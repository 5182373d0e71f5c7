"""Rotary embeddings pinned to those of the engine; transformers would choose them by the longest row of a pass.

`longrope` has different factors for short and long rows; `dynamic` scales with the length. vLLM chooses once, because cached
keys cannot be rotated again: `longrope` by its context length, `dynamic` unscaled (phi3_long_rope_scaled_rope.py and
dynamic_ntk_scaling_rope.py). So a token's rotation depends on its position alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"
PINNED = "pinned"
"""Name of a rotary type for which transformers does not inspect the longest row of a pass."""


def pin_rotations(model: nn.Module, max_model_len: int | None) -> None:
    """Pin the rotations of `model`. `max_model_len`: context length of the engine; None: the model's own."""
    module: Any
    for module in model.modules():
        for layers, kind in _get_rope_types(module).items():
            if kind == LONGROPE:
                _choose_factors(module, layers, max_model_len)
            if kind == LONGROPE or "dynamic" in kind:
                module.rope_type = PINNED if layers is None else {**_get_rope_types(module), layers: PINNED}


def uses_long_factors(config: Any, max_model_len: int | None) -> bool | None:
    """Return whether an engine with this context length uses the factors for long rows; None if there is only one set."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, Mapping) and each.get("rope_type") == LONGROPE:
            return _is_long(max_model_len, text.max_position_embeddings, each["original_max_position_embeddings"])
    return None


def _is_long(max_model_len: int | None, made_for: int, original: int) -> bool:
    return min(max_model_len or made_for, made_for) > original


def _get_rope_types(module: nn.Module) -> dict[str | None, str]:
    """Return the rotary types by layer type, or under None for all layers."""
    kind: Any = getattr(module, "rope_type", None) or {}
    return {None: kind} if isinstance(kind, str) else kind if isinstance(kind, dict) else {}


def _choose_factors(module: Any, layers: str | None, max_model_len: int | None) -> None:
    """Give the module its own configuration, with the same factors for short and long rows.

    `layers`: layer type to change; None if there is only one.
    """
    module.config = config = copy.deepcopy(module.config)
    rope = config.rope_parameters if layers is None else config.rope_parameters[layers]
    made_for, original = config.max_position_embeddings, rope["original_max_position_embeddings"]
    chosen = "long" if _is_long(max_model_len, made_for, original) else "short"
    stretch = made_for / original
    scaling = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    scaling = rope.get(f"{chosen}_mscale") or scaling
    rope["attention_factor"] = scaling
    for each in ("short", "long"):
        rope[f"{each}_factor"], rope[f"{each}_mscale"] = rope[f"{chosen}_factor"], scaling
    prefix = "" if layers is None else f"{layers}_"
    by_layer = {} if layers is None else {"layer_type": layers}
    device = getattr(module, f"{prefix}inv_freq").device
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](config, device, **by_layer)
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
