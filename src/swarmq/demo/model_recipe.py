"""Recipe and cache location of the demo's model. Loads no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the model. `head_dim` must suit vLLM's CPU attention kernels (a multiple of 32)."""

    hidden: int = 256
    layers: int = 2
    heads: int = 8
    head_dim: int = 32
    feed_forward: int = 768
    max_tokens: int = 512
    rope_theta: float = 100.0
    """Base of the rotary frequencies: dialogues have about a hundred tokens, for which the usual 10,000 leaves most frequencies
    unused and copying is learned late."""
    spread: float = 0.06
    """Standard deviation of the initial weights, near 1 / sqrt(hidden); the usual 0.02 is for much wider models."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the warmed-up model, besides the code of the demo."""

    seed: int = 0
    architecture: Architecture = Architecture()
    steps: int = 280
    """Steps on demonstrations that mostly call the tool, because copying takes longest to learn."""
    settling_steps: int = 60
    """Further steps on the final mix."""
    batch: int = 32
    similar: int = 8
    """Number of demonstrations of similar length that are padded together."""
    learning_rate: float = 3e-3
    rise: int = 30
    copying_share: float = 0.9
    """Initial probability that a demonstration calls the tool before its next step."""
    tool_share: float = 0.36
    """The same probability in the final mix."""


class WarmupProgress(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    steps: int
    loss: float
    """Mean negative log-probability of the demonstrated assistant tokens."""


def user_cache_folder() -> Path:
    """Return the folder of the user's cache for demo models."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "swarmq" / "demo-models"


def model_folder(cache: Path, recipe: Recipe) -> Path:
    """Return the folder in `cache` for the model of this recipe."""
    return cache / f"demo-model-{recipe_digest(recipe)}"


def is_complete(folder: Path) -> bool:
    return (folder / "config.json").exists()


def recipe_digest(recipe: Recipe) -> str:
    """Return a digest of the recipe and of the code and problems that it uses."""
    digest = hashlib.sha256(msgspec.json.encode(recipe))
    for name in ("agent", "model", "model_recipe", "problems", "tokenizer", "warmup"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]
