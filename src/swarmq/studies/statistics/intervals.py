"""Three intervals for the mean of paired differences, each with other assumptions. Shapes: [S] seeds."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

RESAMPLES = 9_999
EXACT_UP_TO = 14
"""Largest number of differences whose subsets are all enumerated (16,383 of them); beyond, RESAMPLES subsets are drawn."""


class Interval(msgspec.Struct, frozen=True):
    """Bounds in the unit of the metric; infinite where the data cannot bound the mean at this level."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return value < self.low or value > self.high

    def lies_within(self, margin: float) -> bool:
        """Return whether every value of the interval is closer to 0 than `margin`."""
        return -margin < self.low and self.high < margin


UNBOUNDED = Interval(-math.inf, math.inf)


def t_interval(differences: ArrayLike, *, alpha: float = 0.05) -> Interval:
    """Return Student's interval: exact for normal differences, unbounded for fewer than two. Differences that are all equal, as
    those of a coarse metric may be, have no SD to go by: theirs is the interval of the permutations."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return UNBOUNDED
    if are_equal(values):
        return permutation_interval(values, alpha=alpha)
    half = float(stats.t.ppf(1 - alpha / 2, len(values) - 1)) * _error(values)
    return Interval(float(values.mean()) - half, float(values.mean()) + half)


def bootstrap_interval(differences: ArrayLike, *, alpha: float = 0.05, seed: int = 0) -> Interval:
    """Return the bias-corrected and accelerated bootstrap interval (Efron 1987). It is too narrow for few seeds: with five, 95 % intervals cover 83 %."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return UNBOUNDED
    if are_equal(values):
        return Interval(float(values[0]), float(values[0]))
    found = stats.bootstrap(
        (values,), np.mean, method="BCa", confidence_level=1 - alpha, n_resamples=RESAMPLES, rng=np.random.default_rng(seed)
    ).confidence_interval  # fmt: skip
    return Interval(float(found.low), float(found.high))


def permutation_interval(differences: ArrayLike, *, alpha: float = 0.05, seed: int = 0) -> Interval:
    """Return the interval of all means that a sign-flip test does not reject; it assumes only that differences are symmetric.

    The means of all subsets cut the line into equally likely pieces (Hartigan 1969, JASA 64:1303), so it needs no search.
    Fewer than six differences cannot bound a mean at 5 %: the interval is unbounded.
    """
    values = np.asarray(differences, float)
    means = np.sort(_subset_means(values, seed)) if len(values) else values
    left_out = math.floor(alpha / 2 * (len(means) + 1))
    if left_out < 1:
        return UNBOUNDED
    return Interval(float(means[left_out - 1]), float(means[-left_out]))


def permutation_p(differences: ArrayLike, *, seed: int = 0) -> float:
    """Return the two-sided p-value of the sign-flip test of mean 0 (Fisher 1935)."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return 1.0
    return float(
        stats.permutation_test(
            (values,), np.mean, permutation_type="samples", n_resamples=2**EXACT_UP_TO, rng=np.random.default_rng(seed)
        ).pvalue
    )  # fmt: skip


def t_test_p(differences: ArrayLike) -> float:
    """Return the two-sided p-value of the paired t-test; 1 for fewer than two differences, and for equal ones that are 0.
    Other equal ones have no SD to go by: theirs is the p-value of the sign-flip test."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return 1.0
    if are_equal(values):
        return 1.0 if not values.any() else 2.0 ** (1 - len(values))
    return float(2 * stats.t.sf(abs(values.mean()) / _error(values), len(values) - 1))


def are_equal(values: NDArray[np.float64]) -> bool:
    """Return whether values differ by rounding errors at most, so that their SD means nothing."""
    return bool(np.ptp(values) <= 1e-9 * np.abs(values).max())


def _error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _subset_means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    size = len(values)
    if size <= EXACT_UP_TO:
        chosen = np.array(list(itertools.product((0, 1), repeat=size))[1:], float).reshape(-1, size)
    else:
        chosen = np.random.default_rng(seed).integers(0, 2, (RESAMPLES, size)).astype(float)
        chosen = chosen[chosen.any(axis=1)]
    return np.asarray(chosen @ values / chosen.sum(axis=1), float)
