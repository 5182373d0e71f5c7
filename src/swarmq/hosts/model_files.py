"""Fingerprints of models, by which hosts compare their copies, and engines. Weights are compared at each push instead."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

SHAPE_FIELDS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Fields of config.json that are the same in two copies of a model, even if different versions of transformers wrote them."""
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "tekken.json")


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    shape: dict[str, str]
    """Field of config.json -> its value as JSON."""
    tokenizer: str
    """SHA-256 of the vocabulary files."""

    def find_difference(self, other: ModelFingerprint) -> str:
        """Return a text that says what differs in `other`, or "" if nothing does."""
        if field := find_other_field(self.shape, other.shape):
            return f"{field} in its config.json is {other.shape.get(field)}, not {self.shape[field]}"
        return "" if self.tokenizer == other.tokenizer else "its tokenizer's files differ"


def describe_shape(config: Mapping[str, Any]) -> dict[str, str]:
    """Return field -> value as JSON of SHAPE_FIELDS. `config`: content of a config.json."""
    return {field: json.dumps(config[field]) for field in SHAPE_FIELDS if field in config}


def find_other_field(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first field of shape `ours` that has another value in `theirs`, or ""."""
    return next((field for field, value in ours.items() if theirs.get(field) != value), "")


def describe_model(folder: Path) -> ModelFingerprint | None:
    """Return the fingerprint of a model folder; None for a hub name, or for a folder without a readable config.json or tokenizer."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        files = [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files))
    except (OSError, ValueError):
        return None
    if not files:
        return None
    return ModelFingerprint(shape=describe_shape(config), tokenizer=digest.hexdigest())
