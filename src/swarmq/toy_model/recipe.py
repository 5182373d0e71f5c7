"""Recipe of a toy model, and the folder in which finished models are kept. Loads no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a warm-up. With the demonstrations and the code of this package, they determine the model."""

    seed: int = 0
    architecture: Architecture = Architecture()
    steps: int = 280
    """Number of steps on the first chats, most of which show what takes longest to learn, such as copying an expression into a
    tool call."""
    settling_steps: int = 60
    """Number of further steps on the final mix of chats."""
    batch: int = 32
    similar: int = 8
    """Number of demonstrations of similar length that are padded together."""
    learning_rate: float = 3e-3
    rise: int = 30
    """Number of steps in which the learning rate rises linearly, before it falls."""
    tokenizer_chats: int = 2000
    """Number of chats from which the tokenizer is learned, taken before those of the first step."""
    vocabulary: int = 768

    @property
    def first_chats(self) -> int:
        """Number of chats before the final mix: those of the tokenizer and of the first steps."""
        return self.tokenizer_chats + self.steps * self.batch


class WarmupProgress(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    steps: int
    loss: float
    """Mean negative log-probability of the demonstrated assistant tokens."""


def user_cache_folder(name: str = "toy-models") -> Path:
    """Return a folder for finished models in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "swarmq" / name


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds a finished model."""
    return (folder / "config.json").exists()


def digest_sources(recipe: Recipe, sources: Iterable[Path]) -> str:
    """Return a digest of a recipe, of the files that its demonstrations come from, and of this package."""
    digest = hashlib.sha256(msgspec.json.encode(recipe))
    own = (Path(__file__).with_name(f"{name}.py") for name in ("network", "recipe", "tokenizer", "warmup"))
    for path in (*own, *sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
