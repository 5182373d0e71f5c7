"""Generalized advantage estimation over the sampled tokens of an episode."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from support.episodes import make_episode
from swarmq.config import Critic, Train
from swarmq.learner.methods.advantages.gae import Estimates, estimate, estimate_episode
from swarmq.learner.train.critic import value_loss
from swarmq.messages import Rollout, Timings, pack_floats, pack_ids

TRAIN = Train(advantage="gae", critic=Critic(discount=0.9, gae_lambda=0.8))
VALUES = [-1.126, -1.152, 0.567, 0.794, 0.599, -1.555, -0.341, 1.853, 0.468, -0.158, 1.389, 1.586, 0.946, -0.844, 0.932]


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
    """By PPOTrainer.compute_advantages and PPOTrainer.loss of trl 0.11.4, the last version that has them as functions; current ones have
    no PPO. There an episode is one answer; here two of the three have several turns, one of them with a reward by call."""
    found = estimate_all(
        make("a", 3, 3, reward=1.0, call_rewards={"c0": 0.5}),
        make("b", 4, reward=-1.0),
        make("c", 2, 3, reward=2.0),
        values=VALUES,
    )
    assert found.advantages == pytest.approx(
        [
            0.86392157,
            1.18982882,
            0.07127095,
            -0.4688028,
            -0.31749136,
            1.63416507,
            0.04646319,
            -1.86271999,
            -1.07800381,
            -0.80873146,
            -0.5337208,
            -0.70060227,
            -0.16031236,
            1.55992172,
            0.56481354,
        ],
        abs=1e-6,
    )
    assert found.returns == pytest.approx(
        [
            0.35792837,
            0.78512273,
            0.94869824,
            0.424692,
            0.4401,
            1.0,
            0.0062015,
            -0.4546368,
            -0.74844,
            -1.0,
            0.92941948,
            0.89436038,
            1.0056672,
            1.60776,
            2.0,
        ],
        abs=1e-6,
    )
    moved = [
        -1.274,
        -1.077,
        0.498,
        0.676,
        0.762,
        -1.674,
        -0.279,
        1.718,
        0.296,
        -0.325,
        1.935,
        1.421,
        0.548,
        -0.787,
        0.911,
    ]
    loss = value_loss(*(torch.tensor(each) for each in (moved, VALUES, found.returns.tolist())), clip=0.2).mean()
    assert loss.item() == pytest.approx(0.9472613, abs=1e-6)


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
