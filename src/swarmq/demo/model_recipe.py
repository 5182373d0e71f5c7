"""What the demo's model is made by, and where it is kept: nothing here loads torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes. `head_dim` is one that vLLM's CPU attention kernels know (a multiple of 32)."""

    hidden: int = 256
    layers: int = 2
    heads: int = 8
    head_dim: int = 32
    feed_forward: int = 768
    max_tokens: int = 512
    rope_theta: float = 100.0
    """Dialogues are about a hundred tokens long; the usual 10,000 leaves most frequencies unused, and copying is
    learned late."""
    spread: float = 0.06
    """Standard deviation of fresh weights, near 1 / sqrt(hidden); the usual 0.02 is for much wider models."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the result depends on, besides the code of the demo."""

    seed: int = 0
    architecture: Architecture = Architecture()
    steps: int = 280
    """Steps on demonstrations that mostly call the tool, because copying takes longest to learn, ..."""
    settling_steps: int = 60
    """... then steps on the final mix."""
    batch: int = 32
    similar: int = 8
    """Demonstrations of similar length that are padded together."""
    learning_rate: float = 3e-3
    rise: int = 30
    copying_share: float = 0.9
    """Chance that a demonstration calls the tool before its next step, at first ..."""
    tool_share: float = 0.36
    """... and in the final mix."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    steps: int
    loss: float
    """Mean negative log-probability of the demonstrated assistant tokens."""


def user_cache() -> Path:
    """Where models of the demo are kept, from whatever folder it is started."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "swarmq" / "demo-models"


def model_folder(cache: Path, recipe: Recipe) -> Path:
    """Where in `cache` the model of this recipe is, or will be."""
    return cache / f"demo-model-{recipe_digest(recipe)}"


def is_made(folder: Path) -> bool:
    return (folder / "config.json").exists()


def recipe_digest(recipe: Recipe) -> str:
    """Changes with the recipe and with the code and problems it uses."""
    digest = hashlib.sha256(msgspec.json.encode(recipe))
    for name in ("agent", "model", "recipe", "task", "tokenizer", "warmup"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]
