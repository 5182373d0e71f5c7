"""Noise and power against statsmodels and against simulated studies."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from swarmq.studies.statistics import Noise, estimate_noise, paired_power, plan, power_with_looks, seeds_needed
from swarmq.studies.statistics.intervals import Interval
from swarmq.studies.statistics.power import MAX_SEEDS


def test_the_interval_of_the_noise_covers_it():
    """The SD of a difference is that of a seed times the root of 2, and 95 of 100 intervals hold it."""
    rng = np.random.default_rng(0)
    found = [estimate_noise(rng.normal(0.5, 0.3, 6)) for _ in range(1_000)]
    assert np.mean([noise.sd**2 for noise in found]) == pytest.approx(2 * 0.3**2, rel=0.05)
    held = np.mean([noise.interval.low < 0.3 * 2**0.5 < noise.interval.high for noise in found])
    assert held == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("scores", [[], [0.4], [0.4, float("nan")]])
def test_noise_needs_two_finite_scores(scores):
    with pytest.raises(ValueError, match="at least two A/A trials"):
        estimate_noise(scores)


@pytest.mark.parametrize(("effect", "sd", "seeds"), [(0.1, 0.1, 10), (0.05, 0.2, 40), (0.3, 0.1, 3), (0.5, 0.1, 500)])
def test_power_is_that_of_statsmodels(effect, sd, seeds):
    expected = TTestPower().power(effect / sd, seeds, 0.05)
    assert paired_power(effect, sd, seeds) == pytest.approx(1.0 if np.isnan(expected) else expected, abs=1e-6)


def test_power_after_a_pilot_is_the_share_of_studies_that_find_the_effect():
    """Simulated with a true SD that is drawn from what the pilot leaves possible."""
    rng = np.random.default_rng(1)
    sds = 0.1 * np.sqrt(5 / rng.chisquare(5, 20_000))
    differences = 0.08 + sds[:, None] * rng.standard_normal((20_000, 8))
    share = (stats.ttest_1samp(differences, 0, axis=1).pvalue <= 0.05).mean()
    promised = paired_power(0.08, 0.1, 8, dof=5)
    assert promised == pytest.approx(share, abs=0.01)
    assert promised < paired_power(0.08, 0.1, 8) - 0.02, "a small pilot promises less than a known SD"


def test_seeds_needed_is_the_fewest_with_the_wanted_power():
    needed = seeds_needed(0.1, 0.15, power=0.9, alpha=0.025, dof=12)
    assert paired_power(0.1, 0.15, needed, alpha=0.025, dof=12) >= 0.9
    assert paired_power(0.1, 0.15, needed - 1, alpha=0.025, dof=12) < 0.9
    assert seeds_needed(1e-6, 1.0) == MAX_SEEDS + 1
    with pytest.raises(ValueError, match="smallest effect"):
        seeds_needed(0.0, 0.1)


def test_the_plan_counts_every_arm_and_says_what_is_missing():
    noise = Noise(sd=0.1, dof=20, interval=Interval(0.08, 0.14))
    one, three = (plan(0.1, noise, 8, comparisons=arms) for arms in (1, 3))
    assert three.power < one.power
    assert three.seeds_needed > one.seeds_needed
    assert f"{three.seeds_needed} would be enough" in three.sentence()
    assert f"probability {three.power:.2f}" in three.sentence()


def test_noiseless_trials_find_every_effect():
    assert paired_power(0.1, 0.0, 2) == 1.0
    assert paired_power(0.1, 0.1, 1) == 0.0


def test_looks_cost_power_and_save_seeds():
    power, spent = power_with_looks(0.1, 0.08, 12, draws=4_000)
    assert power == pytest.approx(0.78, abs=0.05)
    assert power < paired_power(0.1, 0.08, 12)
    assert spent < 11


def test_no_number_of_seeds_breaks_the_search():
    """scipy's noncentral t is NaN for some of these."""
    assert paired_power(0.05, 0.06068, 505, alpha=0.05 / 3, dof=5) > 0.999
    assert seeds_needed(0.05, 0.06068, alpha=0.05 / 3, dof=5) == 26
