"""Whether tokens were sampled from all of softmax(z / T), which is what the learner computes. Pure."""

from __future__ import annotations

import msgspec

from swarmq.messages import Sampling, Turn

HARMLESS = frozenset({"temperature", "max_tokens", "seed", "stop"})
"""Of the settings of sampling, those that leave the distribution a softmax over the whole vocabulary."""
APART = frozenset({"grammar", "others"})
"""What an answer is held to is the agent's choice, trained all the same; `others` are names themselves."""
WHOLE = Sampling()
COLDEST = 0.01
"""vLLM samples at no lower temperature, whatever it is asked for; 0 takes the likeliest token."""


def find_altered_sampling(sampling: Sampling) -> list[str]:
    """The settings that made it another distribution, as `name=value`: a ratio cannot correct for them afterwards."""
    greedy = [f"temperature={sampling.temperature:g}"] if sampling.temperature < COLDEST else []
    others = [
        f"{name}={value}"
        for name, value in msgspec.structs.asdict(sampling).items()
        if name not in HARMLESS | APART and value != getattr(WHOLE, name) and not (name == "top_k" and value < 0)
    ]
    return [*greedy, *others, *sampling.others]


def is_comparable(turn: Turn) -> bool:
    """Return whether engine and learner, with the same weights, differ about the turn by rounding alone: one weight version, a prompt
    as rendered, and sampling from the whole vocabulary."""
    return (
        len(turn.versions) < 2
        and not turn.repaired
        and not turn.sampling.grammar
        and not find_altered_sampling(turn.sampling)
    )
