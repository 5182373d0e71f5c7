"""The advantage `ema`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from swarmq.config import Train
from swarmq.learner.methods.advantages import EpisodeValues, RewardSet, compare, list_values
from swarmq.learner.methods.advantages.centered import center


def ema(sets: Sequence[RewardSet], _train: Train, baselines: Mapping[str, float]) -> list[EpisodeValues]:
    """Return rewards minus their baselines (2506.24119). Rewards that have no baseline yet are centred within the batch, because
    with A = R every positive reward would reinforce its turn, even the worst one."""
    first = {name: compare(of, center) for name, of in _join_by_baseline(sets).items() if name not in baselines}

    def against(name: str, of: EpisodeValues) -> EpisodeValues:
        if name in first:
            return {episode: first[name][episode] for episode in of if episode in first[name]}
        return {e: {call: reward - baselines[name] for call, reward in own.items()} for e, own in of.items()}

    return [against(_name_baseline(each), each.rewards) for each in sets]


def update_baselines(baselines: Mapping[str, float], sets: Sequence[RewardSet], decay: float) -> dict[str, float]:
    """Return the baselines after a batch: b <- alpha b + (1 - alpha) R for each of its rewards in turn. A baseline that first
    occurs in this batch starts at the mean of its rewards."""
    new = {name: statistics.fmean(list_values(of)) for name, of in _join_by_baseline(sets).items()}
    after = new | dict(baselines)
    for each in sets:
        name = _name_baseline(each)
        for reward in list_values(each.rewards):
            after[name] = decay * after[name] + (1 - decay) * reward
    return after


def _join_by_baseline(sets: Sequence[RewardSet]) -> dict[str, EpisodeValues]:
    """Return the rewards of the batch by the name of their baseline."""
    together: dict[str, dict[str, dict[str, float]]] = {}
    for each in sets:
        for episode, own in each.rewards.items():
            together.setdefault(_name_baseline(each), {}).setdefault(episode, {}).update(own)
    return dict(together)


def _name_baseline(rewards: RewardSet) -> str:
    """Return the kind; for rewards of agents or calls, `KIND/agent/TAG` or `KIND/call/TAG`."""
    return rewards.kind if rewards.level == "episode" else f"{rewards.kind}/{rewards.level}/{rewards.agent or ''}"
