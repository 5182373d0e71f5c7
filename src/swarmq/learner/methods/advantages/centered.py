"""The advantage `centered`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import EpisodeValues, RewardSet, compare, scale
from swarmq.learner.methods.advantages.rloo import leave_one_out


def centered(sets: Sequence[RewardSet], _train: Train, _baselines: Mapping[str, float]) -> list[EpisodeValues]:
    return [compare(each.rewards, center) for each in sets]


def center(rewards: EpisodeValues) -> EpisodeValues:
    """Return `leave_one_out` times (k - 1)/k for k episodes; with one value per episode, each value minus the mean of all
    (2503.20783)."""
    return scale(leave_one_out(rewards), (len(rewards) - 1) / len(rewards))
