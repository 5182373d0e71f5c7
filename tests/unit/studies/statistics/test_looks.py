"""Early looks: the e-value against an integral, and its error under many looks against simulated noise."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from swarmq.studies.statistics import confidence_sequence, e_values
from swarmq.studies.statistics.looks import anytime_p

DIFFERENCES = np.array([0.12, 0.03, 0.20, 0.07, 0.15, -0.02])


def test_an_e_value_is_the_bayes_factor_of_the_t_statistic():
    """Ratio of the statistic's density under effects drawn from the prior to that without effect, integrated numerically."""
    for size in range(2, len(DIFFERENCES) + 1):
        part = DIFFERENCES[:size]
        t, dof = part.mean() / stats.sem(part), size - 1
        over_effects, _ = integrate.quad(
            lambda d, t=t, dof=dof, size=size: stats.norm.pdf(d) * stats.nct.pdf(t, dof, d * math.sqrt(size)), -7, 7, limit=200
        )  # fmt: skip
        assert e_values(part)[-1] == pytest.approx(over_effects / stats.t.pdf(t, dof), rel=1e-4)


NOISES = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "heavy tails": lambda rng, size: rng.standard_t(3, size),
    "trainings that collapse": lambda rng, size: rng.standard_normal(size) + 4 * rng.choice([-1, 0, 1], size, p=[0.1, 0.8, 0.1]),
    "two tasks, right or wrong": lambda rng, size: (rng.binomial(2, 0.5, size) - rng.binomial(2, 0.5, size)) / 2,
}  # fmt: skip


@pytest.mark.parametrize("noise", NOISES)
def test_a_look_after_every_seed_keeps_the_level(noise):
    draws = NOISES[noise](np.random.default_rng(7), (4_000, 50))
    false = (e_values(draws).max(axis=1) >= 20).mean()
    assert 0.001 < false <= 0.05


def test_looks_by_t_tests_would_not_keep_it():
    draws = NOISES["normal"](np.random.default_rng(7), (1_000, 50))
    looks = [stats.ttest_1samp(draws[:, :n], 0, axis=1).pvalue <= 0.05 for n in range(3, 51)]
    assert np.any(looks, axis=0).mean() > 0.2


def test_the_confidence_sequence_holds_the_means_with_small_e_values():
    found = confidence_sequence(DIFFERENCES, alpha=0.2)
    for bound in (found.low, found.high):
        assert e_values(DIFFERENCES - bound)[-1] == pytest.approx(1 / 0.2)
    assert found.low < DIFFERENCES.mean() < found.high


def test_the_confidence_sequence_covers_the_mean_at_all_looks_together():
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(300):
        draws = rng.normal(0.4, 1, 20)
        bounds = [confidence_sequence(draws[:n], alpha=0.1) for n in range(2, 21)]
        missed += any(interval.excludes(0.4) for interval in bounds)
    assert 0 < missed <= 0.1 * 300


def test_later_seeds_take_no_discovery_back():
    """The p-value is that of the best look: later seeds cannot take a discovery back."""
    later = [*DIFFERENCES[:4], 0.1, 0.1, -0.9]
    assert anytime_p(later) == pytest.approx(anytime_p(later[:-1]))
    assert e_values(later)[-1] < 1 < e_values(later)[-2]


def test_one_seed_discovers_nothing_and_equal_differences_count_by_their_number():
    assert anytime_p([]) == anytime_p([0.5]) == 1.0
    assert confidence_sequence([0.5]).low == -math.inf
    assert confidence_sequence([0.5, 0.6]).high == math.inf
    assert e_values([0.1] * 5)[-1] == pytest.approx(36), "equal differences: spread 1 + n to the power of (n - 1) / 2"
    assert e_values([0.0] * 5)[-1] == pytest.approx(6**-0.5)
