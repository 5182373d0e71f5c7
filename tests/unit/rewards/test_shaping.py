"""Rewards out of parts."""

import math

import pytest

from swarmq.errors import OutcomeError
from swarmq.rewards import Score, clip, combine, length_penalty, potential_differences


def test_parts_are_summed_by_weight_and_kept_as_metrics():
    outcome = combine({"right": 1, "short": 0.5}, {"short": 0.2}, success=True)
    assert (outcome.reward, outcome.metrics, outcome.success) == (1.1, {"right": 1.0, "short": 0.5}, True)


def test_what_is_no_number_or_no_part_is_refused():
    for value, says in (
        (math.nan, "nan: a reward or metric must be finite"),
        ("0.9", "'0.9' of type str"),
        (None, "None: every path"),
    ):
        with pytest.raises(OutcomeError, match=f"right is {says}"):
            combine({"right": value})
        with pytest.raises(OutcomeError, match=f"the value of a Score is {says}"):
            Score(value)
    with pytest.raises(OutcomeError, match="weights names wrong; the parts are right"):
        combine({"right": 1.0}, {"wrong": 2.0})
    with pytest.raises(OutcomeError, match="finite"):
        clip(math.nan)


def test_length_is_free_then_costs_then_costs_no_more():
    costs = [length_penalty(length, free=100, full=200) for length in (0, 100, 150, 200, 999)]
    assert costs == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(OutcomeError, match="free must be less than full"):
        length_penalty(1, free=2, full=2)


def test_differences_of_potentials_sum_to_the_way_from_first_to_last():
    assert sum(potential_differences([0.0, 0.3, 0.2, 1.0])) == pytest.approx(1.0)
    assert potential_differences([1.0, 1.0], gamma=0.9) == pytest.approx([-0.1])
    assert clip(7.0) == 1.0
