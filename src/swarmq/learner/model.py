"""Loads the policy: any causal LM of transformers, ready to be trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from swarmq.errors import LearnerError
from swarmq.learner.kept import Checkpointing


def load_lm(
    source: str, *, gradient_checkpointing: bool, empty: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """The causal LM in a folder or of a name, as FP32 master weights if not as `dtype`, and without dropout, as engines compute
    it; `empty`: on the meta device, for a rank that is handed its part. Raises LearnerError: not there, not one."""
    config = load_config(source)
    _drop_nothing(config)
    disable_progress_bar()
    try:
        lm = _without_weights(config, dtype) if empty else _with_weights(source, config, dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise LearnerError(f"model {source}: its weights cannot be loaded: {error}") from error
    lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        Checkpointing.enable(lm)
    return lm


@contextlib.contextmanager
def named_by(setting: str) -> Iterator[None]:
    """Errors about the model say which setting names it."""
    try:
        yield
    except LearnerError as error:
        raise LearnerError(f"{setting}: {error}") from error


def _with_weights(source: str, config: Any, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)


def _without_weights(config: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _drop_nothing(config: Any) -> None:
    """Layers call dropout themselves, with what the config said when they were made: `attention_dropout`, `resid_pdrop`,
    `layerdrop` and the like."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).copy().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def load_config(source: str) -> Any:
    folder = Path(source)
    if not folder.is_dir() and (folder.is_absolute() or source.startswith((".", "~"))):
        raise LearnerError(f"model {source}: there is no such folder; name a Hugging Face model folder or model name")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise LearnerError(f"model {source}: the folder has no config.json; name a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise LearnerError(f"model {source}: cannot be read: {error}") from error
    if hasattr(config, "vision_config"):
        raise LearnerError(
            f"model {source}: {config.model_type!r} takes images, and a learner reads tokens alone: serve it untrained "
            "(policies.*.trained = false), or train a text model"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise LearnerError(
            f"model {source}: {config.model_type!r} is not a causal language model: train one whose architecture ends in ForCausalLM"
        )
    return config


def vocab_size(lm: Any) -> int:
    return int(lm.get_input_embeddings().weight.shape[0])
