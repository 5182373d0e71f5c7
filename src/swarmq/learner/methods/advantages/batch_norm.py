"""The advantage `batch_norm`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import GRPO_EPSILON, EpisodeValues, RewardSet, list_values
from swarmq.learner.methods.advantages.centered import centered


def batch_norm(sets: Sequence[RewardSet], train: Train, baselines: Mapping[str, float]) -> list[EpisodeValues]:
    """Return centred values divided by the standard deviation of all centred values of the batch (REINFORCE++ with a baseline,
    2501.03262)."""
    return divide_by_deviation(centered(sets, train, baselines))


def divide_by_deviation(values: Sequence[EpisodeValues]) -> list[EpisodeValues]:
    """Return the values divided by the root of the mean of their squares."""
    every = [value for of in values for value in list_values(of)]
    deviation = math.sqrt(math.fsum(v * v for v in every) / max(len(every), 1)) + GRPO_EPSILON
    return [{e: {call: value / deviation for call, value in own.items()} for e, own in of.items()} for of in values]
