"""The three intervals against computations of other makes."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from swarmq.studies.statistics import bootstrap_interval, permutation_interval, t_interval
from swarmq.studies.statistics.intervals import Interval, permutation_p, t_test_p

SKEWED = np.array([0.02, 0.05, 0.11, 0.04, 0.30, 0.07, 0.09, 0.01])


def sign_flip_p(differences, mean=0.0):
    """Two-sided p-value by every combination of signs."""
    shifted = differences - mean
    flips = np.array([*itertools.product((-1, 1), repeat=len(shifted))]) @ shifted
    return (np.abs(flips) >= abs(shifted.sum()) - 1e-12).mean()


def test_students_interval_is_that_of_statsmodels():
    found = t_interval(SKEWED, alpha=0.1)
    assert (found.low, found.high) == pytest.approx(DescrStatsW(SKEWED).tconfint_mean(alpha=0.1))
    assert t_test_p(SKEWED) == pytest.approx(DescrStatsW(SKEWED).ttest_mean(0)[1])


def test_the_permutation_interval_holds_the_means_that_the_sign_flip_test_does_not_reject():
    found = permutation_interval(SKEWED, alpha=0.05)
    assert sign_flip_p(SKEWED, found.low + 1e-9) > 0.05 >= sign_flip_p(SKEWED, found.low - 1e-9)
    assert sign_flip_p(SKEWED, found.high - 1e-9) > 0.05 >= sign_flip_p(SKEWED, found.high + 1e-9)
    assert permutation_p(SKEWED) == pytest.approx(sign_flip_p(SKEWED))


def test_the_bootstrap_is_efrons_formula():
    """Bias from the share of resamples below the mean, acceleration from the jackknife (Efron 1987), on resamples of our own."""
    resamples = np.random.default_rng(5).choice(SKEWED, (200_000, len(SKEWED))).mean(1)
    bias = stats.norm.ppf((resamples < SKEWED.mean()).mean())
    left_out = (SKEWED.sum() - SKEWED) / (len(SKEWED) - 1)
    lean = left_out.mean() - left_out
    acceleration = (lean**3).sum() / (6 * (lean**2).sum() ** 1.5)
    z = bias + stats.norm.ppf([0.025, 0.975])
    expected = np.quantile(resamples, stats.norm.cdf(bias + z / (1 - acceleration * z)))
    found = bootstrap_interval(SKEWED)
    assert (found.low, found.high) == pytest.approx(expected, abs=0.03 * np.ptp(expected))
    assert found == bootstrap_interval(SKEWED), "a report is the same every time"


def test_too_few_seeds_bound_nothing():
    assert t_interval([0.3]) == bootstrap_interval([0.3]) == Interval(-math.inf, math.inf)
    assert permutation_interval(SKEWED[:5]) == Interval(-math.inf, math.inf), "32 sign flips have no tail of 2.5 %"
    assert math.isfinite(permutation_interval(SKEWED[:6]).low)
    assert permutation_interval([]) == t_interval([]) == Interval(-math.inf, math.inf)
    assert permutation_p([]) == t_test_p([]) == t_test_p([0.3]) == 1.0


def test_many_seeds_are_sampled_with_nearly_the_same_interval():
    many = np.random.default_rng(2).normal(0.1, 0.2, 40)
    found, student = permutation_interval(many), t_interval(many)
    assert (found.low, found.high) == pytest.approx((student.low, student.high), abs=0.01)


@pytest.mark.parametrize("seeds", [2, 5, 6, 8])
def test_equal_differences_claim_no_more_than_their_signs_do(seeds):
    """Two seeds of a coarse metric often differ by the same amount: no reason to be certain."""
    values = 0.1 * np.arange(1, seeds + 1) - 0.1 * np.arange(seeds)  # equal but for rounding
    assert t_test_p(values) == pytest.approx(sign_flip_p(values))
    assert t_test_p(0 * values) == 1.0
    found, at = t_interval(values), pytest.approx((0.1, 0.1))
    assert (found.low, found.high) == (at if seeds >= 6 else (-math.inf, math.inf))
    assert msgspec.structs.astuple(bootstrap_interval(values)) == at
