"""The advantage `centered`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import EpisodeValues, RewardSet, center, compare


def centered(sets: Sequence[RewardSet], _train: Train, _baselines: Mapping[str, float]) -> list[EpisodeValues]:
    return [compare(each.rewards, center) for each in sets]
