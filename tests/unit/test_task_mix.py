"""The task mix: what holds at a step, and whole groups that follow it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmq.config import MixPoint, MixSchedule, SwarmJob
from swarmq.errors import ConfigError
from swarmq.task_mix import Stretch, deal, shares

MATH, CODE = {"math": 1.0}, {"code": 1.0}
HALF = {"math": 0.5, "code": 0.5}


def scheduled(shape: str) -> tuple[Stretch, ...]:
    points = (MixPoint(step=10, mix=HALF), MixPoint(step=20, mix=CODE))
    return (Stretch(from_step=0, mix=MATH, schedule=MixSchedule(shape=shape, points=points)),)


@pytest.mark.parametrize(
    ("shape", "step", "math"),
    [
        ("linear", 1, 0.95),
        ("linear", 5, 0.75),
        ("linear", 10, 0.5),
        ("linear", 15, 0.25),
        ("linear", 99, 0.0),
        ("cosine", 5, 0.75),
        ("cosine", 2, 1 - 0.5 * (1 - 0.8090169943749475) / 2),
        ("table", 9, 1.0),
        ("table", 10, 0.5),
        ("table", 20, 0.0),
    ],
)
def test_a_scheduled_mix_goes_from_point_to_point(shape, step, math):
    mix = shares(scheduled(shape), step)
    assert mix.get("math", 0.0) == pytest.approx(math)
    assert sum(mix.values()) == pytest.approx(1)


def test_a_stretch_holds_until_the_next_begins():
    stretches = (Stretch(from_step=0, mix=MATH), Stretch(from_step=7, mix=CODE))
    assert [list(shares(stretches, step)) for step in (1, 6, 7, 8)] == [["math"], ["math"], ["code"], ["code"]]


def test_what_a_kind_lends_the_others_get_in_their_proportions():
    stretches = (Stretch(from_step=0, mix={"a": 0.5, "b": 0.3, "c": 0.2}),)
    assert shares(stretches, 1, lent={"a"}) == pytest.approx({"b": 0.6, "c": 0.4})
    assert shares(stretches, 1, lent={"a", "b", "c"}) == {"a": 0.5, "b": 0.3, "c": 0.2}, "nobody is left to lend to"


@settings(deadline=None)
@given(st.lists(st.integers(5, 30), min_size=1, max_size=4), st.integers(4, 12), st.integers(0, 3))
def test_whole_groups_follow_the_mix_within_one_group_and_carry_the_rest(parts, groups, gone):
    """Also when a kind is away for a while: what it lent is neither owed to it nor by it afterwards."""
    mix = {f"k{i}": part / sum(parts) for i, part in enumerate(parts)}
    carry, taken, exact = {}, Counter(), Counter()
    for batch in range(40):
        away = {f"k{gone}"} if 10 <= batch < 20 else set()
        present = shares((Stretch(from_step=0, mix=mix),), batch + 1, away)
        counts, carry = deal(present, carry, groups)
        assert sum(counts.values()) == groups
        assert sum(carry.values()) == pytest.approx(0, abs=1e-6)
        if batch < 10:
            taken.update(counts)
            exact.update({kind: share * groups for kind, share in present.items()})
            assert all(abs(taken[kind] - exact[kind]) < 1 + 1e-6 for kind in mix)
        assert all(abs(debt) < 2 for debt in carry.values())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mix": {"a": 0.5}}, "mix: the shares sum to 0.5, not 1"),
        ({"mix": {"a": 1.5}}, "mix"),
        ({"mix": {"A": 1.0}}, "'A' must be 1 to 40 lower-case"),
        ({"mix_schedule": {"points": []}}, "mix_schedule.points: at least one"),
        ({"mix_schedule": {"points": [{"step": 5, "mix": {"a": 0.7}}]}}, "points[0].mix: the shares sum to 0.7"),
        (
            {"mix_schedule": {"points": [{"step": 5, "mix": {"a": 1.0}}, {"step": 5, "mix": {"a": 1.0}}]}},
            "steps must rise",
        ),
        ({"mix_schedule": {"shape": "square", "points": [{"step": 5, "mix": {"a": 1.0}}]}}, "mix_schedule.shape"),
        ({"kinds": {"a": {"group_size": 1}}}, "min_group: 2 is more than kinds.a.group_size 1"),
        ({"kinds": {"a": {"advantage": "best"}}}, "kinds"),
        ({"policies": {"judge": {"model": "m", "trained": False}}}, "no policy is trained"),
    ],
)
def test_a_wrong_mix_is_refused_with_its_place(settings, words):
    with pytest.raises(ConfigError) as refused:
        SwarmJob.build({"run": "r", "policies": {"main": {"model": "m"}}, **settings})
    assert words in str(refused.value)
