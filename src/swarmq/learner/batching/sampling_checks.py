"""Check that tokens were sampled from softmax(z / T) over the whole vocabulary, the distribution that the learner computes.
Pure."""

from __future__ import annotations

import msgspec

from swarmq.messages import Sampling, Turn

NEUTRAL_PARAMETERS = frozenset({"temperature", "max_tokens", "seed", "stop"})
"""Sampling parameters that leave the distribution a softmax over the whole vocabulary."""
CHECKED_SEPARATELY = frozenset({"grammar", "others"})
"""Fields of `Sampling` that are not compared with their defaults: answers under a grammar are trained, because the agent chose the
grammar; `others` lists further parameters that changed the distribution."""
DEFAULTS = Sampling()
MIN_TEMPERATURE = 0.01
"""Lowest positive temperature of vLLM; at 0 it takes the most probable token."""


def find_altered_sampling(sampling: Sampling) -> list[str]:
    """Return the parameters that changed the distribution, as `name=value`. No importance ratio corrects for them afterwards."""
    greedy = [f"temperature={sampling.temperature:g}"] if sampling.temperature < MIN_TEMPERATURE else []
    others = [
        f"{name}={value}"
        for name, value in msgspec.structs.asdict(sampling).items()
        if name not in NEUTRAL_PARAMETERS | CHECKED_SEPARATELY
        and value != getattr(DEFAULTS, name)
        and not (name == "top_k" and value < 0)
    ]
    return [*greedy, *others, *sampling.others]


def is_comparable(turn: Turn) -> bool:
    """Return whether log-probabilities of engine and learner, under the same weights, differ by rounding alone in this turn.

    That requires one weight version, a prompt without repairs, and sampling from the whole vocabulary.
    """
    return (
        len(turn.versions) < 2
        and not turn.repaired
        and not turn.sampling.grammar
        and not find_altered_sampling(turn.sampling)
    )
