"""Generalized advantage estimation over the sampled tokens of an episode."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from support.episodes import make_episode
from swarmq.config import Critic, Train
from swarmq.learner.methods.advantages.gae import Estimates, estimate, estimate_episode
from swarmq.learner.train.critic import value_loss
from swarmq.messages import Rollout, Timings, pack_floats, pack_ids

TRAIN = Train(advantage="gae", critic=Critic(discount=0.9, gae_lambda=0.8))  # as in the golden numbers
GOLDEN = json.loads(Path(__file__).with_name("trl_ppo_golden.json").read_text())
"""Written by scripts/trl_ppo_golden.py."""


def make(name: str, *lengths: int, reward: float = 0.0, **fields: object) -> Rollout:
    """An episode with turns of so many sampled tokens, one after another."""
    episode = make_episode(name, reward=reward, turns=len(lengths), members=1)
    turns = tuple(
        msgspec.structs.replace(
            turn,
            sampled_ids=pack_ids([1] * length),
            logprobs=pack_floats([-1.0] * length),
            versions=(),
            agent=None,
            timings=Timings(began_at=float(number)),
        )
        for number, (turn, length) in enumerate(zip(episode.turns, lengths, strict=True))
    )
    return msgspec.structs.replace(episode, turns=turns, **fields)


def estimate_all(*episodes: Rollout, values: list[float], train: Train = TRAIN) -> Estimates:
    return estimate(episodes, np.array(values), train, among={episode.episode_id for episode in episodes})


def test_advantages_returns_and_value_loss_are_trls() -> None:
    """There an episode is one answer; here two of the three have several turns, one of them with a reward by call."""
    found = estimate_all(
        make("a", 3, 3, reward=1.0, call_rewards={"c0": 0.5}),
        make("b", 4, reward=-1.0),
        make("c", 2, 3, reward=2.0),
        values=GOLDEN["values"],
    )
    assert found.advantages == pytest.approx(GOLDEN["advantages"], abs=1e-6)
    assert found.returns == pytest.approx(GOLDEN["returns"], abs=1e-6)
    moved, values, returns = (
        torch.tensor(each) for each in (GOLDEN["moved"], GOLDEN["values"], found.returns.tolist())
    )
    loss = value_loss(moved, values, returns, clip=GOLDEN["value_clip"]).mean()
    assert loss.item() == pytest.approx(GOLDEN["value_loss"], abs=1e-6)


def test_without_discount_an_advantage_is_what_the_episode_got_less_the_value() -> None:
    episode = make("a", 2, 1, reward=3.0)
    got = estimate_episode(episode, np.array([0.5, 1.0, -1.0]), Train(advantage="gae"))
    assert got.tolist() == pytest.approx([2.5, 2.0, 4.0])


def test_agents_of_an_episode_are_sequences_of_their_own() -> None:
    episode = make("a", 1, 1, 1, reward=1.0, agent_rewards={"judge": 5.0})
    first, second, third = episode.turns
    episode = msgspec.structs.replace(episode, turns=(first, msgspec.structs.replace(second, agent="judge"), third))
    got = estimate_episode(episode, np.zeros(3), Train(advantage="gae"))
    assert got.tolist() == [1.0, 5.0, 1.0]


def test_choices_of_a_request_are_alternatives_and_turns_count_in_the_order_in_which_they_began() -> None:
    """The last turn of the record began first; the two others answer one request."""
    one, other, first = make("a", 1, 1, 2, reward=1.0, call_rewards={"c1": 3.0}).turns
    turns = (
        msgspec.structs.replace(one, timings=Timings(began_at=5.0), request_id="r"),
        msgspec.structs.replace(other, timings=Timings(began_at=5.0), request_id="r"),
        msgspec.structs.replace(first, timings=Timings(began_at=1.0)),
    )
    episode = msgspec.structs.replace(make("a", 1, reward=1.0, call_rewards={"c1": 3.0}), turns=turns)
    got = estimate_episode(episode, np.zeros(4), Train(advantage="gae"))
    assert got.tolist() == [1.0, 3.0, 2.0, 2.0]


def test_a_call_that_sampled_nothing_changes_nothing() -> None:
    plain, gap = make("a", 2, 1, reward=1.0), make("a", 2, 0, 1, reward=1.0)
    values = np.array([0.3, -0.2, 0.5])
    assert estimate_episode(gap, values, TRAIN).tolist() == estimate_episode(plain, values, TRAIN).tolist()


def test_other_kinds_and_left_out_episodes_have_no_estimates() -> None:
    train = msgspec.structs.replace(TRAIN, advantages={"code": "rloo"})
    episodes = [make("a", 2, reward=1.0), make("b", 1, kind="code"), make("c", 1)]
    found = estimate(episodes, np.zeros(4), train, among={"a-0", "b-0"})
    assert found.known.tolist() == [True, True, False, False]
    parts = list(found.split([episodes[:1], episodes[1:]]))
    assert [part.known.tolist() for part in parts] == [[True, True], [False, False]]


def test_explained_variance_is_1_for_right_values_0_for_equal_ones_and_unknown_for_equal_returns() -> None:
    good, bad = make("a", 2, reward=1.0), make("b", 2, reward=0.0)
    plain = Train(advantage="gae")
    right, level, wrong = ([1.0, 1.0, 0.0, 0.0], [0.5] * 4, [0.0, 0.0, 1.0, 1.0])
    shares = [estimate_all(good, bad, values=each, train=plain).explained_variance() for each in (right, level, wrong)]
    assert shares == pytest.approx([1.0, 0.0, -3.0])
    assert estimate_all(good, make("c", 1, reward=1.0), values=[0.0] * 3, train=plain).explained_variance() is None
