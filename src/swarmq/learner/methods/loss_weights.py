"""Weights of tokens in the loss, set per episode before tokens are laid out, so that layouts cannot change the objective.

L = (1 / units) * sum of weight * loss over the tokens that pass all filters. Units are counted after filters, over the whole
batch and all ranks: tokens for `token`, else episodes that have a token left. For `episode`, an episode's weight is divided
among its tokens that are left.
"""

from __future__ import annotations

from typing import Literal

Units = Literal["tokens", "episodes"]


def token_weight(name: str, *, episode_tokens: int, constant_length: int) -> float:
    """Return the weight of each of an episode's `episode_tokens` trained tokens."""
    match name:
        case "token":
            return 1.0
        case "episode":
            return 1.0 / max(episode_tokens, 1)
        case "constant":
            return 1.0 / constant_length
        case _:
            raise AssertionError(name)


def normalization_units(name: str) -> Units:
    return "tokens" if name == "token" else "episodes"
