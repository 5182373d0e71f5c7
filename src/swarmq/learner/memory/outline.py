"""A model's configuration, and its outline on the meta device: shapes without weights, from which memory is estimated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarmq.engine.server.model_check import TRAINED_VISION_MODELS
from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.memory import host
from swarmq.learner.memory.model_copies import find_files


@contextlib.contextmanager
def name_setting_in_errors(setting: str) -> Iterator[None]:
    """Prefix errors about a model with the setting that names the model."""
    try:
        yield
    except LearnerError as error:
        raise type(error)(f"{setting}: {error}") from error


@contextlib.contextmanager
def explain_errors(source: str, what: str, instead: str) -> Iterator[None]:
    """Turn any error about a model's files into a LearnerError that names the model and what to do."""
    try:
        yield
    except LearnerError:
        raise
    except Exception as error:
        if host.is_out_of_memory(error):
            instead = "free some of the host's memory, or raise the limit of this process (ulimit -v, the container's)"
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        reason = " ".join(str(error).split()).removesuffix(".")
        raise LearnerError(f"model {source}: {what}: {kind}{reason}; {instead}") from error


def build_outline(source: str, config: Any, dtype: torch.dtype | None = None) -> Any:
    """Build the model that `config` describes, on the meta device and without weights. Raises LearnerError if that is
    impossible."""
    with (
        explain_errors(
            source,
            "its config.json does not describe a model that transformers can build",
            "correct it, or fetch its files again",
        ),
        torch.device("meta"),
    ):
        return get_auto_class(config).from_config(config, **({"dtype": dtype} if dtype else {}))


def get_auto_class(config: Any) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def load_config(source: str) -> Any:
    """Load the configuration of a causal LM, or of a model with images that can be trained. Raises LearnerError for any other
    model."""
    files = find_files(source)
    folder = Path(files)
    if not folder.is_dir() and (folder.is_absolute() or source.startswith((".", "~"))):
        raise SetUpError(f"model {source}: there is no such folder; name a Hugging Face model folder or model name")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise SetUpError(f"model {source}: the folder has no config.json; name a Hugging Face model folder")
    with explain_errors(source, "cannot be read", "correct its config.json, or fetch its files again"):
        config = AutoConfig.from_pretrained(files)
    if hasattr(config, "vision_config"):
        if config.model_type in TRAINED_VISION_MODELS:
            return config
        raise SetUpError(
            f"model {source}: {config.model_type!r} takes images, and of these models a learner trains only "
            f"{', '.join(TRAINED_VISION_MODELS)}: serve it untrained (policies.*.trained = false), or train another one"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise SetUpError(
            f"model {source}: {config.model_type!r} is not a causal language model: train one whose architecture ends in ForCausalLM"
        )
    return config
