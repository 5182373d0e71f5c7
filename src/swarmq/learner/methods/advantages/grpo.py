"""The advantage `grpo`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import (
    GRPO_EPSILON,
    EpisodeValues,
    RewardSet,
    center,
    compare,
    list_values,
    scale,
)


def grpo(sets: Sequence[RewardSet], _train: Train, _baselines: Mapping[str, float]) -> list[EpisodeValues]:
    return [compare(each.rewards, standardize) for each in sets]


def standardize(rewards: EpisodeValues) -> EpisodeValues:
    """Return centred values divided by their standard deviation, with n - 1 in its denominator (2402.03300)."""
    return scale(center(rewards), 1 / (statistics.stdev(list_values(rewards)) + GRPO_EPSILON))
