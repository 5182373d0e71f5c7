"""Advantages: how much better a reward is than those it is compared with. One file for each built-in method, with a function of
the file's name. Without torch, because the batch feeder uses them, too."""

from __future__ import annotations

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


def list_values(rewards: EpisodeValues) -> list[float]:
    return [value for own in rewards.values() for value in own.values()]


def scale(rewards: EpisodeValues, factor: float) -> EpisodeValues:
    return {episode: {call: value * factor for call, value in own.items()} for episode, own in rewards.items()}
