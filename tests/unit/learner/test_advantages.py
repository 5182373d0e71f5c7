"""Advantages against their formulas, and who is credited with what."""

from __future__ import annotations

import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.episodes import make_episode, make_group
from swarmq.learner.algorithms.advantages import WITHIN_GROUP, advantages, has_signal

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=9)


@given(REWARDS)
def test_rloo_is_the_reward_against_the_mean_of_the_others(rewards: list[float]) -> None:
    wanted = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert WITHIN_GROUP["rloo"](rewards) == pytest.approx(wanted, abs=1e-9)


@given(REWARDS)
def test_centered_and_grpo_follow_their_formulas(rewards: list[float]) -> None:
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    assert WITHIN_GROUP["centered"](rewards) == pytest.approx([r - mean for r in rewards], abs=1e-9)
    wanted = [(r - mean) / (deviation + 1e-6) for r in rewards]
    assert WITHIN_GROUP["grpo"](rewards) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_batch_norm_divides_by_the_deviation_of_all_centred_values() -> None:
    groups = [make_group("a", (0.0, 1.0), turns=1), make_group("b", (0.0, 0.0, 3.0), turns=1)]
    got = advantages(groups, "batch_norm")
    centred = {"a-0": -0.5, "a-1": 0.5, "b-0": -1.0, "b-1": -1.0, "b-2": 2.0}
    deviation = (sum(v * v for v in centred.values()) / 5) ** 0.5
    assert {k: v[0] for k, v in got.items()} == pytest.approx({k: v / deviation for k, v in centred.items()}, rel=1e-4)


def test_every_turn_of_an_episode_gets_the_episodes_advantage() -> None:
    got = advantages([make_group("a", (0.0, 1.0), turns=3)], "rloo")
    assert got == {"a-0": [-1.0] * 3, "a-1": [1.0] * 3}


def test_an_agents_own_reward_is_compared_with_the_same_agent_only() -> None:
    group = make_group("a", (0.0, 0.0), turns=2)
    tags = (("solver", "judge"), ("solver", "judge"))
    rewards = ({"solver": 1.0, "judge": 5.0}, {"solver": 3.0, "judge": 5.0})
    group = [
        msgspec.structs.replace(
            e,
            agent_rewards=r,
            turns=tuple(msgspec.structs.replace(t, agent=a) for t, a in zip(e.turns, agents, strict=True)),
        )
        for e, agents, r in zip(group, tags, rewards, strict=True)
    ]
    assert advantages([group], "centered") == {"a-0": [-1.0, 0.0], "a-1": [1.0, 0.0]}
    assert has_signal(group), "equal episode rewards, but the solvers differ"


def test_a_calls_own_reward_comes_before_the_episodes() -> None:
    def with_call(member: int, reward: float, call_reward: float):
        e = make_episode("a", member, reward=reward, turns=2)
        turns = tuple(msgspec.structs.replace(t, agent=None) for t in e.turns)
        return msgspec.structs.replace(e, turns=turns, call_rewards={"c1": call_reward})

    group = [with_call(0, 0.0, 10.0), with_call(1, 2.0, 20.0)]
    assert advantages([group], "centered") == {"a-0": [-1.0, -5.0], "a-1": [1.0, 5.0]}


@pytest.mark.parametrize(
    ("rewards", "signal"), [((1.0, 1.0), False), ((0.1 + 0.2, 0.3), False), ((0.0, 1.0), True), ((1.0,), False)]
)
def test_equal_rewards_and_lone_episodes_carry_no_signal(rewards: tuple[float, ...], signal: bool) -> None:
    assert has_signal(make_group("a", rewards)) is signal
    if not signal:
        got = advantages([make_group("a", rewards, turns=1)], "rloo")
        assert all(abs(v[0]) < 1e-9 for v in got.values())
