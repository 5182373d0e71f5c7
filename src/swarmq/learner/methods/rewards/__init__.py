"""Reward transforms, which change an episode's reward before it is compared with others. One file for each built-in one. Without
torch."""

from __future__ import annotations

from typing import Protocol

from swarmq.config import Train
from swarmq.learner.methods.registry import find_method
from swarmq.learner.methods.rewards.length_penalty import compute_length_penalty
from swarmq.messages import Rollout


class RewardFunction(Protocol):
    """A reward transform. Returns the reward in place of `reward`, which already has the length penalty."""

    def __call__(self, episode: Rollout, reward: float, train: Train, /) -> float: ...


def transform_reward(episode: Rollout, train: Train) -> float:
    """Return the reward by which an episode is compared with others."""
    reward = episode.reward - compute_length_penalty(episode, train)
    if train.reward_transform is None:
        return reward
    transform: RewardFunction = find_method("reward", train.reward_transform)
    return transform(episode, reward, train)
