"""What one token weighs. Weights are set per episode before rows are made, so rows cannot change the objective.

L = (1 / units) * sum of weight * loss over the tokens that no filter left out. The units are counted over the whole
batch, all ranks included, after the filters: tokens for `token`, episodes with a token left for the others. So are the
tokens of an episode, for `episode`: its weight is shared out among those that are left.
"""

from __future__ import annotations

from typing import Literal

Units = Literal["tokens", "episodes"]


def token_weight(name: str, *, episode_tokens: int, constant_length: int) -> float:
    """The weight of each of an episode's `episode_tokens` trained tokens."""
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
