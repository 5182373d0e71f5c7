"""Advantages against their formulas, and who is credited with what."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.episodes import make_episode, make_group
from support.own_methods import REWARD, write_own_methods
from swarmq.config import LengthPenalty, Loss, Train
from swarmq.learner.methods import registry
from swarmq.learner.methods.advantages import RewardSet
from swarmq.learner.methods.credit import compute_advantages, find_credit_levels, has_signal, update_baselines
from swarmq.learner.methods.registry import find_method
from swarmq.messages import Rollout, Timings

Judge = Callable[[int, int], tuple[float, float]]
"""What an episode's two calls say -> their rewards."""
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=9).filter(lambda values: max(values) - min(values) > 1e-9)


def of_one_value_each(method: str, rewards: list[float]) -> list[float]:
    given = RewardSet(
        kind="default", level="episode", rewards={str(i): {"": reward} for i, reward in enumerate(rewards)}
    )
    (values,) = find_method("advantage", method)([given], Train(), {})
    return [values[str(i)][""] for i in range(len(rewards))]


@given(REWARDS)
def test_rloo_is_the_reward_against_the_mean_of_the_others(rewards: list[float]) -> None:
    wanted = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert of_one_value_each("rloo", rewards) == pytest.approx(wanted, abs=1e-9)


@given(REWARDS)
def test_centered_and_grpo_follow_their_formulas(rewards: list[float]) -> None:
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    assert of_one_value_each("centered", rewards) == pytest.approx([r - mean for r in rewards], abs=1e-9)
    wanted = [(r - mean) / (deviation + 1e-6) for r in rewards]
    assert of_one_value_each("grpo", rewards) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_batch_norm_divides_by_the_deviation_of_all_centred_values() -> None:
    groups = [make_group("a", (0.0, 1.0), turns=1), make_group("b", (0.0, 0.0, 3.0), turns=1)]
    got = compute_advantages(groups, Train(advantage="batch_norm"))
    centred = {"a-0": -0.5, "a-1": 0.5, "b-0": -1.0, "b-1": -1.0, "b-2": 2.0}
    deviation = (sum(v * v for v in centred.values()) / 5) ** 0.5
    assert {k: v[0] for k, v in got.items()} == pytest.approx({k: v / deviation for k, v in centred.items()}, rel=1e-4)


def test_reinforce_plus_plus_compares_with_the_batch_of_the_kind_and_divides_by_the_deviation_of_all() -> None:
    """Also groups of one, and groups with equal rewards."""
    groups = [
        make_group("a", (1.0, 1.0), turns=1),
        make_group("b", (4.0,), turns=1),
        make_group("c", (5.0, 7.0), kind="code", turns=1),
    ]
    centred = {"a-0": -1.0, "a-1": -1.0, "b-0": 2.0, "c-0": -1.0, "c-1": 1.0}
    deviation = (sum(v * v for v in centred.values()) / 5) ** 0.5
    train = Train(advantage="reinforce_plus_plus")
    got = {k: v[0] for k, v in compute_advantages(groups, train).items()}
    assert got == pytest.approx({k: v / deviation for k, v in centred.items()}, rel=1e-4)
    assert has_signal(groups[0], train)
    equal = compute_advantages([make_group("a", (1.0, 1.0), turns=1)], train)
    assert list(equal.values()) == [[0.0], [0.0]], "a batch of equal rewards teaches nothing"


def test_every_turn_of_an_episode_gets_the_episodes_advantage() -> None:
    got = compute_advantages([make_group("a", (0.0, 1.0), turns=3)], Train(advantage="rloo"))
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
    assert compute_advantages([group], Train(advantage="centered")) == {"a-0": [-1.0, None], "a-1": [1.0, None]}
    assert has_signal(group, Train()), "equal episode rewards, but the solvers differ"
    scaled = compute_advantages([group], Train(advantage="batch_norm"))["a-1"]
    assert scaled == [pytest.approx(1.0, rel=1e-5), None], "equal rewards of judges do not narrow the deviation"
    supervised = Train(loss=Loss(name="sft"))
    assert None not in compute_advantages([group], supervised)["a-0"], "what needs no baseline leaves nothing out"


def test_a_turn_without_anything_to_compare_it_with_is_not_trained() -> None:
    """One episode of the group alone has a judge."""
    group = make_group("a", (0.0, 1.0), turns=2)
    turns = tuple(msgspec.structs.replace(t, agent=a) for t, a in zip(group[0].turns, ("solver", "judge"), strict=True))
    group[0] = msgspec.structs.replace(group[0], turns=turns, agent_rewards={"judge": 5.0})
    assert compute_advantages([group], Train(advantage="centered")) == {"a-0": [-0.5, None], "a-1": [0.5, 0.5]}
    ema = Train(advantage="ema")
    assert compute_advantages([group], ema, {"default": 0.5, "default/agent/judge": 4.0})["a-0"] == [-0.5, 1.0]


def test_a_calls_own_reward_comes_before_the_episodes() -> None:
    def with_call(member: int, reward: float, call_reward: float):
        e = make_episode("a", member, reward=reward, turns=2)
        turns = tuple(msgspec.structs.replace(t, agent=None) for t in e.turns)
        return msgspec.structs.replace(e, turns=turns, call_rewards={"c1": call_reward})

    group = [with_call(0, 0.0, 10.0), with_call(1, 2.0, 20.0)]
    assert compute_advantages([group], Train(advantage="centered")) == {"a-0": [-1.0, -5.0], "a-1": [1.0, 5.0]}


@pytest.mark.parametrize(
    ("rewards", "signal"), [((1.0, 1.0), False), ((0.1 + 0.2, 0.3), False), ((0.0, 1.0), True), ((1.0,), False)]
)
def test_equal_rewards_and_lone_episodes_carry_no_signal(rewards: tuple[float, ...], signal: bool) -> None:
    assert has_signal(make_group("a", rewards), Train()) is signal
    if not signal:
        got = compute_advantages([make_group("a", rewards, turns=1)], Train(advantage="rloo"))
        assert list(got.values()) == [[None]] * len(rewards)


def test_ema_compares_with_what_the_kind_gave_before_and_then_learns_it() -> None:
    train = Train(advantage="ema", ema_decay=0.9)
    batch = [make_group("a", (1.0,), turns=2), make_group("b", (0.0,), kind="code", turns=1)]
    assert compute_advantages(batch, train, {"default": 0.25, "code": 0.5}) == {"a-0": [0.75, 0.75], "b-0": [-0.5]}
    assert update_baselines({"default": 0.25, "code": 0.5}, batch, train) == pytest.approx(
        {"default": 0.325, "code": 0.45}
    )


def test_a_baseline_that_is_new_begins_with_the_mean_so_that_no_reward_is_its_own_advantage() -> None:
    train = Train(advantage="ema")
    batch = [make_group("a", (1.0,), turns=1), make_group("b", (3.0,), turns=1)]
    assert compute_advantages(batch, train) == {"a-0": [-1.0], "b-0": [1.0]}


def test_only_ema_and_losses_without_advantages_take_groups_of_equal_rewards() -> None:
    equal = make_group("a", (1.0, 1.0))
    assert not has_signal(equal, Train())
    assert has_signal(equal, Train(advantage="ema"))


def test_discounted_returns_follow_their_recursion_agent_by_agent() -> None:
    """G_k = r_k + gamma G_{k+1}; an agent's last call without a reward of its own answers for the episode's."""
    agents = ("a", "b", "a", "b", "a")
    rng = random.Random(3)
    group = []
    for member, reward in enumerate((1.0, 0.0)):
        e = make_episode("g", member, reward=reward, turns=5)
        turns = tuple(msgspec.structs.replace(t, agent=a) for t, a in zip(e.turns, agents, strict=True))
        group.append(msgspec.structs.replace(e, turns=turns, call_rewards={"c0": rng.random(), "c3": rng.random()}))
    wanted = {}
    for episode in group:
        r, gamma = episode.call_rewards, 0.5
        a2, b1 = episode.reward, r["c3"]
        wanted[episode.episode_id] = [r["c0"] + gamma * gamma * a2, gamma * b1, gamma * a2, b1, a2]
    got = compute_advantages([group], Train(advantage="rloo", call_discount=0.5))
    for (episode_id, returns), other in zip(wanted.items(), reversed(wanted.values()), strict=True):
        means = {a: statistics.fmean(g for g, b in zip(other, agents, strict=True) if a == b) for a in "ab"}
        assert got[episode_id] == pytest.approx([g - means[a] for g, a in zip(returns, agents, strict=True)])


def plain_group(rewards: tuple[float, ...], *, turns: int) -> list[Rollout]:
    """Without agent tags."""
    return [
        msgspec.structs.replace(e, turns=tuple(msgspec.structs.replace(t, agent=None) for t in e.turns))
        for e in make_group("g", rewards, turns=turns)
    ]


def test_one_call_reward_in_a_group_has_all_its_episodes_credited_with_returns() -> None:
    """The only success of four is praised, though a judge gave one of its calls a 0 and looked at no other episode."""
    success, *failures = plain_group((1.0, 0.0, 0.0, 0.0), turns=3)
    group = [msgspec.structs.replace(success, call_rewards={"c0": 0.0}), *failures]
    train = Train(advantage="rloo", call_discount=0.5)
    got = compute_advantages([group], train)
    assert got["g-0"] == [0.25, 0.5, 1.0]
    assert got["g-1"] == got["g-2"] == got["g-3"] == pytest.approx([-1.75 / 9] * 3)
    assert find_credit_levels(group, train) == ["call"] * 12
    assert find_credit_levels(group, Train()) == ["call", *["episode"] * 11]


def test_choices_of_one_request_are_one_step_of_the_returns() -> None:
    """A first request, a second one of two choices, of which each is continued."""
    one, other = plain_group((8.0, 0.0), turns=5)
    requests = ("first", "second", "second", "third", "fourth")
    turns = tuple(msgspec.structs.replace(t, request_id=r) for t, r in zip(one.turns, requests, strict=True))
    one = msgspec.structs.replace(one, turns=turns, call_rewards={"c1": 1.0, "c2": 2.0})
    got = compute_advantages([[one, other]], Train(advantage="rloo", call_discount=0.5))
    assert got["g-0"] == [(1.0 + 2.0 + 2.0 + 2.0) / 2 / 2, 1.0 + 2.0, 2.0 + 2.0, 4.0, 8.0]


def test_returns_follow_the_order_in_which_requests_began() -> None:
    """Turns arrive when their answers are whole: here that of the request that began first comes last."""
    one, other = plain_group((4.0, 0.0), turns=3)
    turns = tuple(
        msgspec.structs.replace(t, timings=Timings(began_at=began))
        for t, began in zip(one.turns, (20.0, 30.0, 10.0), strict=True)
    )
    one = msgspec.structs.replace(one, turns=turns, call_rewards={"c0": 1.0})
    assert compute_advantages([[one, other]], Train(advantage="rloo", call_discount=0.5))["g-0"] == [3.0, 4.0, 1.5]


def test_a_judges_call_reward_changes_nothing_for_other_agents() -> None:
    group = make_group("g", (1.0, 0.0), turns=2)
    group = [
        msgspec.structs.replace(
            e,
            turns=(msgspec.structs.replace(e.turns[0], agent="a"), msgspec.structs.replace(e.turns[1], agent="judge")),
        )
        for e in group
    ]
    group[0] = msgspec.structs.replace(group[0], call_rewards={"c1": 0.5})
    assert find_credit_levels(group, Train(call_discount=0.9)) == ["episode", "call"] * 2


def test_calls_that_one_episode_alone_has_are_not_compared_with_each_other() -> None:
    first, second = plain_group((0.0, 1.0), turns=3)
    first = msgspec.structs.replace(first, call_rewards={"c1": 0.0, "c2": 1.0})
    group = [first, second]
    assert compute_advantages([group], Train(advantage="rloo")) == {"g-0": [-1.0, None, None], "g-1": [1.0, 1.0, 1.0]}
    assert not has_signal([first, msgspec.structs.replace(second, reward=0.0)], Train())
    assert compute_advantages([[first]], Train(advantage="ema")) == {"g-0": [0.0, 0.0, 0.0]}, (
        "nor is a baseline made of them"
    )


@pytest.mark.parametrize("method", ["centered", "grpo", "batch_norm"])
def test_values_of_calls_are_scaled_alike_by_every_method(method: str) -> None:
    """(k - 1)/k of the difference from the other episodes, over what the method divides by."""
    first, second = plain_group((0.0, 0.0), turns=2)
    first = msgspec.structs.replace(first, call_rewards={"c0": 1.0, "c1": 2.0})
    second = msgspec.structs.replace(second, call_rewards={"c0": 6.0})
    centred = {"g-0": [-2.5, -2.0], "g-1": [2.25, None]}
    divisor = {
        "centered": 1.0,
        "grpo": statistics.stdev([1.0, 2.0, 6.0]),
        "batch_norm": statistics.fmean([2.5**2, 2.0**2, 2.25**2]) ** 0.5,
    }[method]
    for episode_id, values in compute_advantages([[first, second]], Train(advantage=method)).items():
        wanted = [None if value is None else pytest.approx(value / divisor, rel=1e-5) for value in centred[episode_id]]
        assert values == wanted


LOGITS = (0.3, -0.4)
"""Of saying 1 and not 0, at an episode's first and second call."""
OUTCOMES = list(itertools.product((0, 1), repeat=2))


def chance(call: int, said: int) -> float:
    one = 1 / (1 + math.exp(-LOGITS[call]))
    return one if said else 1 - one


def slope(call: int, said: int) -> float:
    """Of log chance by the call's logit."""
    return said - chance(call, 1)


def gradient(rewards: Judge, discount: float) -> list[float]:
    """E[G_k d log chance of call k], by the formula."""
    total = [0.0, 0.0]
    for said in OUTCOMES:
        first, second = rewards(*said)
        likely = math.prod(map(chance, (0, 1), said))
        for call, value in enumerate((first + discount * second, second)):
            total[call] += likely * value * slope(call, said[call])
    return total


def expected(rewards: Judge, train: Train, size: int) -> list[float]:
    """What a group's advantages make of it on average, over all that its episodes can say."""
    total = [0.0, 0.0]
    plain = plain_group((0.0,) * size, turns=2)
    for all_said in itertools.product(OUTCOMES, repeat=size):
        likely = math.prod(chance(call, said) for ones in all_said for call, said in enumerate(ones))
        judged = (dict(zip(("c0", "c1"), rewards(*said), strict=True)) for said in all_said)
        group = [msgspec.structs.replace(e, call_rewards=r) for e, r in zip(plain, judged, strict=True)]
        for said, values in zip(all_said, compute_advantages([group], train).values(), strict=True):
            for call, value in enumerate(values):
                total[call] += likely * (value or 0.0) * slope(call, said[call]) / size
    return total


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("rewards", "discount"),
    [
        (lambda first, _: (0.0, first), None),
        (lambda _, second: (0.0, second), 1.0),
        (lambda first, second: (first, first * second), 0.5),
    ],
    ids=["the first call decides what the second gets", "the second is rewarded", "both are, and depend"],
)
def test_rewards_by_call_give_the_policy_gradient_exactly(rewards: Judge, discount: float | None, size: int) -> None:
    wanted = gradient(rewards, discount or 0.0)
    assert expected(rewards, Train(advantage="rloo", call_discount=discount), size) == pytest.approx(wanted, abs=1e-12)
    share = [(size - 1) / size * value for value in wanted]
    assert expected(rewards, Train(advantage="centered", call_discount=discount), size) == pytest.approx(
        share, abs=1e-12
    )
    first_batch = Train(advantage="ema", call_discount=discount)
    assert expected(rewards, first_batch, size) == pytest.approx(share, abs=1e-12)


def test_an_own_transform_changes_rewards_of_episodes_after_the_length_penalty(tmp_path: Path) -> None:
    write_own_methods(tmp_path)
    registry.adopt([registry.read_code("reward", REWARD, str(tmp_path))])
    group = [make_episode("a", 0, reward=1.0, turns=1), make_episode("a", 1, reward=1.0, turns=3)]
    train = Train(advantage="centered", reward_transform=REWARD, options={"cost": 0.25})
    assert compute_advantages([group], train) == {"a-0": [0.25], "a-1": [-0.25] * 3}
    assert has_signal(group, train)
    assert not has_signal(group, Train())


def test_length_costs_reward_beyond_what_is_free() -> None:
    group = make_group("a", (1.0, 1.0), turns=4)
    shorter, longer = sorted(sum(len(turn.sampled_ids) // 4 for turn in episode.turns) for episode in group)
    assert longer > shorter
    train = Train(advantage="centered", length_penalty=LengthPenalty(free=shorter, full=2 * longer - shorter, weight=4))
    got = sorted(values[0] for values in compute_advantages([group], train).values())
    assert got == pytest.approx([-1.0, 1.0]), "half-way between free and full costs half the weight"
    assert has_signal(group, train)


def test_each_kind_is_compared_by_its_own_method() -> None:
    groups = [make_group("a", (0.0, 1.0), turns=1, kind="math"), make_group("b", (0.0, 1.0), turns=1, kind="code")]
    got = compute_advantages(groups, Train(advantage="rloo", advantages={"code": "centered"}))
    assert {name: values[0] for name, values in got.items()} == {"a-0": -1.0, "a-1": 1.0, "b-0": -0.5, "b-1": 0.5}
