"""The advantage `rloo`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import EpisodeValues, RewardSet, compare


def rloo(sets: Sequence[RewardSet], _train: Train, _baselines: Mapping[str, float]) -> list[EpisodeValues]:
    return [compare(each.rewards, leave_one_out) for each in sets]


def leave_one_out(rewards: EpisodeValues) -> EpisodeValues:
    """Return each value minus the mean of the other episodes' values; unbiased for two or more episodes (2402.14740)."""
    own = {episode: math.fsum(of.values()) for episode, of in rewards.items()}
    total, count = math.fsum(own.values()), sum(map(len, rewards.values()))
    others = {episode: (total - own[episode]) / (count - len(of)) for episode, of in rewards.items()}
    return {e: {call: reward - others[e] for call, reward in of.items()} for e, of in rewards.items()}
