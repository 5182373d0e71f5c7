"""What a study may claim: pairs, Holm's correction, verdicts."""

import msgspec
import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from swarmq.studies.statistics import Rule, adjust_p, compare_arms, pair

SEEDS = range(8)
RULE = Rule(smallest_effect=0.1)
NOISE = np.random.default_rng(3).normal(0, 0.02, (8, 4))


def arm(shift=0.0, noise=NOISE, seeds=SEEDS):
    return {seed: {f"task {i}": 0.5 + shift + value for i, value in enumerate(noise[seed])} for seed in seeds}


def other(shift=0.0, seed=5, sd=0.02):
    return arm(shift, np.random.default_rng(seed).normal(0, sd, (8, 4)))


def verdicts(rule=RULE, **arms):
    return {found.arm: found.verdict for found in compare_arms({"base": arm(), **arms}, "base", SEEDS, rule)}


def test_an_effect_is_better_worse_of_no_interest_or_undecided():
    arms = {"up": other(0.2), "down": other(-0.2, 6), "same": other(0, 7), "noisy": other(0, 8, sd=1.0)}
    expected = {"up": "better", "down": "worse", "same": "no effect of interest", "noisy": "undecided"}
    assert verdicts(**arms) == expected
    assert verdicts(rule=Rule(smallest_effect=0.1, looks=True), **arms) == expected


def test_a_lower_metric_may_be_the_better_one():
    less = Rule(smallest_effect=0.1, higher_is_better=False)
    assert verdicts(rule=less, up=other(0.2)) == {"up": "worse"}


def test_an_arm_without_results_is_undecided():
    assert verdicts(none={}, one=arm(0.5, seeds=[0])) == {"none": "undecided", "one": "undecided"}
    assert compare_arms({"base": arm()}, "base", SEEDS, RULE) == []


def test_pairs_are_of_the_same_seed_and_the_same_task():
    one, two = arm(0.3, seeds=[4, 1, 2]), arm(seeds=[2, 4, 7])
    del one[4]["task 0"]
    seeds, differences = pair(one, two, SEEDS)
    assert seeds == [2, 4], "in the order of the study, not of the results"
    assert differences == pytest.approx(np.full((2, 3), 0.3))


@pytest.mark.parametrize("shifts", [(1.2, 0.9, 0.0), (0.0, 0.0, 0.0, 0.0), (0.8, 0.8), (0.5,)])
def test_holms_correction_is_that_of_statsmodels(shifts):
    draws = [np.random.default_rng(i).normal(shift, 1, 12) for i, shift in enumerate(shifts)]
    p, holm = zip(*adjust_p(draws, RULE), strict=True)
    assert holm == pytest.approx(multipletests(p, method="holm")[1])
    assert adjust_p([], RULE) == []


def test_arms_that_were_dropped_count_as_if_they_had_no_effect():
    draws = [np.random.default_rng(i).normal(shift, 1, 12) for i, shift in enumerate((1.2, 0.9))]
    p, holm = zip(*adjust_p(draws, RULE, dropped=6), strict=True)
    assert holm == pytest.approx(multipletests([*p, *[1.0] * 6], method="holm")[1][:2])


def test_many_arms_without_effect_keep_the_level_together():
    rng = np.random.default_rng(11)
    false = [
        min(p for _, p in adjust_p(list(rng.standard_normal((5, 6))), RULE)) <= 0.05 for _ in range(300)
    ]  # fmt: skip
    assert np.mean(false) <= 0.05 + 2 * (0.05 * 0.95 / 300) ** 0.5


def test_a_comparison_can_be_written_down():
    (found,) = compare_arms({"base": arm(), "up": other(0.2)}, "base", SEEDS, RULE)
    assert (len(found.seeds), found.tasks) == (8, 4)
    assert found.mean == pytest.approx(np.mean(found.differences))
    assert found.interval.low < found.mean < found.interval.high
    assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found
