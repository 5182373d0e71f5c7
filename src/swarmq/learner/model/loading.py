"""Loads the policy: any causal LM of transformers, ready to be trained."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.memory import host
from swarmq.learner.model.activation_checkpointing import Checkpointing

LAYER = re.compile(r"(.*?)\.(\d+)\.")
"""In a weight's name: what holds the layers, and the number of one."""


def load_lm(
    source: str, *, gradient_checkpointing: bool, empty: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """The causal LM in the folder, or of the name, `source`, with weights of `dtype`; without dropout and noise, as engines compute it.
    `empty`: on the meta device, for a rank that is handed its part. Raises LearnerError when there is none, or none that can be
    trained."""
    config = load_config(source)
    _drop_nothing(config)
    disable_progress_bar()
    lm = outline_of(source, config, dtype)
    if not empty:
        lm = _with_weights(source, config, dtype)
    lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif any("jitter" in name for name in vars(module)):  # a router that adds noise, or draws experts, in training
            module.training = False
    if gradient_checkpointing:
        Checkpointing.enable(lm)
    return lm


@contextlib.contextmanager
def named_by(setting: str) -> Iterator[None]:
    """Errors about the model say which setting names it."""
    try:
        yield
    except LearnerError as error:
        raise type(error)(f"{setting}: {error}") from error


@contextlib.contextmanager
def _refused(source: str, what: str, instead: str) -> Iterator[None]:
    """A broken folder ends in as many kinds of errors as there are libraries that look into it."""
    try:
        yield
    except LearnerError:
        raise
    except Exception as error:
        if host.refuses(error):
            instead = "free some of the host's memory, or raise the limit of this process (ulimit -v, the container's)"
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        said = " ".join(str(error).split()).removesuffix(".")
        raise LearnerError(f"model {source}: {what}: {kind}{said}; {instead}") from error


def _with_weights(source: str, config: Any, dtype: torch.dtype) -> Any:
    """Raises LearnerError also where the files hold other weights than the configuration asks for: those that are missing
    would be random."""
    instead = "fetch its files again, all of them"
    if getattr(config, "quantization_config", None):
        instead = "take the same model with weights that are not quantised"
    with _refused(source, "its weights cannot be loaded", instead):
        lm, found = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    wrong = {
        "missing": found["missing_keys"],
        "of another shape": {name for name, *_ in found["mismatched_keys"]},
        "of layers that it does not have": _of_further_layers(lm, found["unexpected_keys"]),
    }
    if said := "; ".join(f"{what}: {_some(names)}" for what, names in wrong.items() if names):
        raise SetUpError(
            f"model {source}: its weights are not those that its config.json describes ({said}); fetch its files again, "
            "all of them, or correct config.json"
        )
    return lm


def _of_further_layers(lm: Any, unexpected: Iterable[str]) -> set[str]:
    """Other weights may be left out: of vision towers, of heads that predict several tokens, and constants of old files."""
    decoder = f"{lm.base_model_prefix}."  # which names lack where a folder has the decoder alone

    def place(name: str) -> tuple[str, int]:
        found = LAYER.match(name.removeprefix(decoder))
        return (found[1], int(found[2])) if found else ("", -1)

    last = dict(sorted(place(name) for name, _ in lm.named_parameters()))
    ahead = getattr(lm.config, "num_nextn_predict_layers", None) or 0  # kept behind the others, as layers of their kind
    return {name for name in unexpected if place(name)[1] > last.get(place(name)[0], math.inf) + ahead}


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def outline_of(source: str, config: Any, dtype: torch.dtype | None = None) -> Any:
    """The model that `config`, of `source`, describes, on the meta device. Raises LearnerError when there can be no such model."""
    with (
        _refused(source, "its config.json describes no model that can be made", "correct it, or fetch its files again"),
        torch.device("meta"),
    ):
        return AutoModelForCausalLM.from_config(config, **({"dtype": dtype} if dtype else {}))


def _drop_nothing(config: Any) -> None:
    """Layers call dropout themselves, with what the config said when they were made: `attention_dropout`, `resid_pdrop`,
    `layerdrop` and the like."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).copy().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def load_config(source: str) -> Any:
    """Of a causal LM that takes text alone. Raises LearnerError for anything else."""
    folder = Path(source)
    if not folder.is_dir() and (folder.is_absolute() or source.startswith((".", "~"))):
        raise SetUpError(f"model {source}: there is no such folder; name a Hugging Face model folder or model name")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise SetUpError(f"model {source}: the folder has no config.json; name a Hugging Face model folder")
    with _refused(source, "cannot be read", "correct its config.json, or fetch its files again"):
        config = AutoConfig.from_pretrained(source)
    if hasattr(config, "vision_config"):
        raise SetUpError(
            f"model {source}: {config.model_type!r} takes images, and a learner reads tokens alone: serve it untrained "
            "(policies.*.trained = false), or train a text model"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise SetUpError(
            f"model {source}: {config.model_type!r} is not a causal language model: train one whose architecture ends in ForCausalLM"
        )
    return config


def vocab_size(lm: Any) -> int:
    return int(lm.get_input_embeddings().weight.shape[0])
