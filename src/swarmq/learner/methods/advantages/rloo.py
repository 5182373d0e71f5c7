"""The advantage `rloo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import EpisodeValues, RewardSet, compare, leave_one_out


def rloo(sets: Sequence[RewardSet], _train: Train, _baselines: Mapping[str, float]) -> list[EpisodeValues]:
    return [compare(each.rewards, leave_one_out) for each in sets]
