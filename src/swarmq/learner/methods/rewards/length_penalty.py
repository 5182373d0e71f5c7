"""The penalty for long episodes."""

from __future__ import annotations

from swarmq.config import Train
from swarmq.messages import Rollout


def compute_length_penalty(episode: Rollout, train: Train) -> float:
    """Return the penalty for the episode's length (soft overlong punishment, 2503.14476)."""
    if (rule := train.length_penalty) is None:
        return 0.0
    sampled = sum(turn.num_sampled for turn in episode.turns)
    return rule.weight * min(max((sampled - rule.free) / (rule.full - rule.free), 0.0), 1.0)
