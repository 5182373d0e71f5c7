"""Power of a study for its smallest effect of interest, and the seeds it needs: computed and said before money is spent."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from scipy import stats

from swarmq.studies.statistics.looks import e_values
from swarmq.studies.statistics.noise import Noise

MAX_SEEDS = 1_000
QUANTILES = 60
"""Points of the distribution of the true SD over which power is averaged."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a study with these seeds can find."""

    effect: float
    """Smallest effect of interest, in the unit of the metric."""
    noise: Noise
    alpha: float
    """Level of the strictest of Holm's tests: the study's level over its number of comparisons."""
    seeds: int
    power: float
    """Probability of finding the effect with these seeds."""
    seeds_needed: int
    """Seeds for the wanted power; MAX_SEEDS + 1 if even MAX_SEEDS do not suffice."""

    def sentence(self) -> str:
        enough = "enough" if self.seeds >= self.seeds_needed else f"{self.seeds_needed} would be enough"
        if self.seeds_needed > MAX_SEEDS:
            enough = f"more than {MAX_SEEDS} would be needed"
        return (
            f"{self.seeds} seeds find an effect of {self.effect:g} with probability {self.power:.2f}; {enough}. "
            f"SD of a paired difference: {self.noise.sd:.4g} ({self.noise.interval.low:.4g} to {self.noise.interval.high:.4g})."
        )


def paired_power(effect: float, sd: float, seeds: int, *, alpha: float = 0.05, dof: int | None = None) -> float:
    """Return the power of a two-sided paired t-test (noncentral t; Cohen 1988).

    With `dof`, the SD is an estimate with so many degrees of freedom, and power is averaged over what the true SD may be
    (assurance; O'Hagan, Stevens, Campbell 2005): plain power promises too much after a small pilot.
    """
    if seeds < 2:
        return 0.0
    if sd == 0:
        return 1.0 if effect else alpha
    sds = np.array([sd])
    if dof is not None:
        sds = sd * np.sqrt(dof / stats.chi2.ppf((np.arange(QUANTILES) + 0.5) / QUANTILES, dof))
    critical = stats.t.ppf(1 - alpha / 2, seeds - 1)
    shift = abs(effect) / sds * math.sqrt(seeds)
    # scipy gives NaN for some tails that are 1 or 0 to all digits
    right = np.nan_to_num(stats.nct.sf(critical, seeds - 1, shift), nan=1.0)
    wrong = np.nan_to_num(stats.nct.cdf(-critical, seeds - 1, shift), nan=0.0)
    return float((right + wrong).mean())


def seeds_needed(
    effect: float, sd: float, *, power: float = 0.8, alpha: float = 0.05, dof: int | None = None
) -> int:  # fmt: skip
    """Return the smallest number of seeds with this power, or MAX_SEEDS + 1. Raises ValueError for an effect of 0."""
    if not effect:
        raise ValueError("the smallest effect of interest is 0: name one that would change a decision")
    low, high = 2, MAX_SEEDS + 1
    while low < high:  # power grows with seeds
        middle = (low + high) // 2
        if paired_power(effect, sd, middle, alpha=alpha, dof=dof) >= power:
            high = middle
        else:
            low = middle + 1
    return low


def plan(
    effect: float, noise: Noise, seeds: int, *, comparisons: int = 1, alpha: float = 0.05, power: float = 0.8
) -> Plan:
    """Return what a study can find if its `comparisons` arms share the level `alpha` by Holm's correction."""
    level = alpha / max(comparisons, 1)
    return Plan(
        effect=effect,
        noise=noise,
        alpha=level,
        seeds=seeds,
        power=paired_power(effect, noise.sd, seeds, alpha=level, dof=noise.dof),
        seeds_needed=seeds_needed(effect, noise.sd, power=power, alpha=level, dof=noise.dof),
    )


def power_with_looks(
    effect: float, sd: float, seeds: int, *, alpha: float = 0.05, dof: int | None = None, seed: int = 0, draws: int = 20_000
) -> tuple[float, float]:  # fmt: skip
    """Return power and mean number of seeds spent, if the study looks after each seed and stops at a discovery; simulated."""
    rng = np.random.default_rng(seed)
    sds = np.full(draws, sd) if dof is None else sd * np.sqrt(dof / rng.chisquare(dof, draws))
    differences = effect + sds[:, None] * rng.standard_normal((draws, seeds))
    crossed = e_values(differences) >= 1 / alpha
    spent = np.where(crossed.any(1), crossed.argmax(1) + 1, seeds)
    return float(crossed.any(1).mean()), float(spent.mean())
