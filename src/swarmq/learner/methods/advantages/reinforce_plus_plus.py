"""The advantage `reinforce_plus_plus`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import EpisodeValues, RewardSet, compare_in_batch
from swarmq.learner.methods.advantages.batch_norm import divide_by_deviation


def reinforce_plus_plus(
    sets: Sequence[RewardSet], _train: Train, _baselines: Mapping[str, float]
) -> list[EpisodeValues]:
    """Return rewards minus the batch's mean for their kind, divided by the standard deviation of all these values of the batch
    (2501.03262)."""
    return divide_by_deviation(compare_in_batch(sets))
