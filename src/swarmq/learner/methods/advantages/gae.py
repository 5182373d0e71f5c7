"""The advantage `gae`: generalized advantage estimation (1506.02438) over the sampled tokens of an episode, by the values of a critic.

An agent's requests of an episode form one sequence of tokens t, in the order in which the requests began; prompts and observations
between them are skipped. With the value V_t of the context before token t, and r_t the reward of a model call at its last token:

  delta_t = r_t + discount V_(t+1) - V_t        A_t = delta_t + discount gae_lambda A_(t+1)        return_t = A_t + V_t

Behind the last token, V and A are 0. Several choices of one request are alternatives: V and A behind the request before are the
means over their first tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swarmq.config import Critic, Train
from swarmq.learner.methods.advantages import EQUAL_WITHIN, EpisodeValues, RewardSet
from swarmq.learner.methods.credit import group_by_request
from swarmq.learner.methods.rewards import transform_reward
from swarmq.messages import Rollout

WHITEN_EPSILON = 1e-8

Floats = NDArray[np.float64]


class Estimates(NamedTuple):
    """Estimates for the N sampled tokens of a batch: episode by episode, turn by turn."""

    values: Floats  # [N] by the critic, before the batch is trained
    advantages: Floats  # [N] whitened
    returns: Floats  # [N] what the critic learns
    known: NDArray[np.bool_]  # [N] whether there is an estimate for the token

    def split(self, parts: Sequence[Sequence[Rollout]]) -> Iterator[Estimates]:
        """Yield the estimates of each part of the batch; the parts are in the batch's order."""
        token = 0
        for part in parts:
            mine = slice(token, token := token + sum(turn.num_sampled for each in part for turn in each.turns))
            yield Estimates(self.values[mine], self.advantages[mine], self.returns[mine], self.known[mine])

    def explained_variance(self) -> float | None:
        """Return 1 - Var(return - value) / Var(return): 1 for a critic that is always right, 0 for a constant one. None if all
        returns are equal, or one is not finite."""
        returns, values = self.returns[self.known], self.values[self.known]
        if not len(returns) or not np.isfinite(returns).all() or np.ptp(returns) <= EQUAL_WITHIN:
            return None
        return 1.0 - float(np.var(returns - values) / np.var(returns))


def gae(sets: Sequence[RewardSet], _train: Train, _baselines: Mapping[str, float]) -> list[EpisodeValues]:
    """Return the rewards themselves. The learner replaces them, token by token, by those of `estimate`."""
    return [each.rewards for each in sets]


def estimate(episodes: Sequence[Rollout], values: Floats, train: Train, *, among: Collection[str]) -> Estimates:
    """Return the estimates for a batch. `values` [N]: the critic's. `among`: ids of the episodes that get
    estimates, if their kind has this advantage.

    The advantages have mean 0 and variance 1 over all tokens that have estimates. If a value is not finite, none of them is.
    """
    advantages, known, begin = np.zeros(len(values)), np.zeros(len(values), np.bool_), 0
    for episode in episodes:
        mine = slice(begin, begin := begin + sum(turn.num_sampled for turn in episode.turns))
        if episode.turns and train.of_kind(episode.kind).advantage == "gae" and episode.episode_id in among:
            advantages[mine] = estimate_episode(episode, values[mine], train)
            known[mine] = True
    with np.errstate(invalid="ignore"):
        returns = np.where(known, advantages + values, 0.0)
    advantages[known] = whiten(advantages[known]) if np.isfinite(advantages[known]).all() else np.nan
    return Estimates(values, advantages, returns, known)


def estimate_episode(episode: Rollout, values: Floats, train: Train) -> Floats:
    """Return the advantage of each sampled token of an episode, turn by turn, before whitening. `values`: in the same order."""
    ends = np.cumsum([turn.num_sampled for turn in episode.turns])
    parts = dict(zip((turn.call_id for turn in episode.turns), np.split(values, ends[:-1]), strict=True))
    advantages = dict[str, list[float]]()
    for agent in dict.fromkeys(turn.agent for turn in episode.turns):
        next_value = next_advantage = 0.0
        # the last request gets the agent's or episode's reward, unless its call has a reward of its own
        unrated = episode.agent_rewards.get(agent or "", transform_reward(episode, train))
        for request in reversed(group_by_request(episode, agent)):
            if not (choices := [turn for turn in request if turn.num_sampled]):
                continue
            for turn in choices:
                reward = episode.call_rewards.get(turn.call_id, unrated)
                advantages[turn.call_id] = _run_back(
                    parts[turn.call_id].tolist(), reward, next_value, next_advantage, train.critic
                )
            next_value = statistics.fmean(float(parts[turn.call_id][0]) for turn in choices)
            next_advantage = statistics.fmean(advantages[turn.call_id][0] for turn in choices)
            unrated = 0.0
    return np.array([value for turn in episode.turns for value in advantages.get(turn.call_id, ())], np.float64)


def whiten(values: Floats) -> Floats:
    """Return the values less their mean, divided by their standard deviation, with n - 1 in its denominator."""
    if not len(values):
        return values
    centered = values - values.mean()
    whitened: Floats = centered / math.sqrt(float(np.square(centered).sum()) / max(len(values) - 1, 1) + WHITEN_EPSILON)
    return whitened


def _run_back(
    values: Sequence[float], reward: float, next_value: float, next_advantage: float, critic: Critic
) -> list[float]:
    """Return the advantages of the tokens of one model call. `next_value`, `next_advantage`: those behind its last token."""
    found = []
    for value in reversed(values):
        next_advantage = (
            reward + critic.discount * next_value - value + critic.discount * critic.gae_lambda * next_advantage
        )
        found.append(next_advantage)
        next_value, reward = value, 0.0
    return found[::-1]
