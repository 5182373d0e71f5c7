"""The advantage `ema`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import EpisodeValues, RewardSet, compare_in_batch, join_sets, list_values


def ema(sets: Sequence[RewardSet], _train: Train, baselines: Mapping[str, float]) -> list[EpisodeValues]:
    """Return rewards minus their baselines (2506.24119). Rewards that have no baseline yet are centred within the batch, because
    with A = R every positive reward would reinforce its turn, even the worst one."""
    new = iter(compare_in_batch([each for each in sets if each.source not in baselines]))
    return [
        {e: {call: reward - baselines[each.source] for call, reward in own.items()} for e, own in each.rewards.items()}
        if each.source in baselines
        else next(new)
        for each in sets
    ]


def update_baselines(baselines: Mapping[str, float], sets: Sequence[RewardSet], decay: float) -> dict[str, float]:
    """Return the baselines after a batch: b <- alpha b + (1 - alpha) R for each of its rewards in turn. A baseline that first
    occurs in this batch starts at the mean of its rewards."""
    new = {source: statistics.fmean(list_values(of)) for source, of in join_sets(sets).items()}
    after = new | dict(baselines)
    for each in sets:
        for reward in list_values(each.rewards):
            after[each.source] = decay * after[each.source] + (1 - decay) * reward
    return after
