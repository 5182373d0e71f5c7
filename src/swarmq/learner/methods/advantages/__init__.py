"""Advantages: how much better a reward is than those it is compared with. One file for each built-in method, with a function of
the file's name. Without torch, because the batch feeder uses them, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from swarmq.config import Train

EQUAL_WITHIN = 1e-9
"""Difference below which rewards count as equal, because only rounding separates them."""
GRPO_EPSILON = 1e-6

EpisodeValues = Mapping[str, Mapping[str, float]]
"""Episode id -> call id -> reward or advantage; the call id is "" for rewards of episodes and agents."""


class RewardSet(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of one group that are compared with each other."""

    kind: str
    level: Literal["episode", "agent", "call"]
    """What the rewards were given to."""
    agent: str | None = None
    """Agent tag of rewards of agents and calls."""
    rewards: EpisodeValues

    @property
    def source(self) -> str:
        """Name for all rewards of a batch with the same kind, level and agent: `KIND`, `KIND/agent/TAG` or `KIND/call/TAG`."""
        return self.kind if self.level == "episode" else f"{self.kind}/{self.level}/{self.agent or ''}"


class AdvantageFunction(Protocol):
    """An advantage method. It keeps no state.

    `sets`: all rewards of a batch. Returns as many results, each with a value for every reward of its set, or empty if the set
    has nothing to compare, so that its turns are not trained. `baselines`: name -> baseline of `ema`.
    """

    def __call__(
        self, sets: Sequence[RewardSet], train: Train, baselines: Mapping[str, float], /
    ) -> Sequence[EpisodeValues]: ...


def compare(rewards: EpisodeValues, within: Callable[[EpisodeValues], EpisodeValues]) -> EpisodeValues:
    """Return advantages by the estimator `within`; empty if only one episode has rewards, or if all are equal."""
    values = list_values(rewards)
    return within(rewards) if len(rewards) > 1 and max(values) - min(values) > EQUAL_WITHIN else {}


def compare_in_batch(sets: Sequence[RewardSet]) -> list[EpisodeValues]:
    """Return centred values of each set, compared with all rewards of the batch that have the same source."""
    values = {source: compare(of, center) for source, of in join_sets(sets).items()}
    return [{e: values[each.source][e] for e in each.rewards if e in values[each.source]} for each in sets]


def join_sets(sets: Sequence[RewardSet]) -> dict[str, EpisodeValues]:
    """Return the rewards of the batch by their source."""
    together: dict[str, dict[str, dict[str, float]]] = {}
    for each in sets:
        for episode, own in each.rewards.items():
            together.setdefault(each.source, {}).setdefault(episode, {}).update(own)
    return dict(together)


def leave_one_out(rewards: EpisodeValues) -> EpisodeValues:
    """Return each value minus the mean of the other episodes' values; unbiased for two or more episodes (2402.14740)."""
    own = {episode: math.fsum(of.values()) for episode, of in rewards.items()}
    total, count = math.fsum(own.values()), sum(map(len, rewards.values()))
    others = {episode: (total - own[episode]) / (count - len(of)) for episode, of in rewards.items()}
    return {e: {call: reward - others[e] for call, reward in of.items()} for e, of in rewards.items()}


def center(rewards: EpisodeValues) -> EpisodeValues:
    """Return `leave_one_out` times (k - 1)/k for k episodes; with one value per episode, each value minus the mean of all
    (2503.20783)."""
    return scale(leave_one_out(rewards), (len(rewards) - 1) / len(rewards))


def list_values(rewards: EpisodeValues) -> list[float]:
    return [value for own in rewards.values() for value in own.values()]


def scale(rewards: EpisodeValues, factor: float) -> EpisodeValues:
    return {episode: {call: value * factor for call, value in own.items()} for episode, own in rewards.items()}
