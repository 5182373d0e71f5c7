"""Noise of seeds: how much two trials differ that differ in nothing but the seed. Measured by A/A trials before a study."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from swarmq.studies.statistics.intervals import Interval


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Standard deviation of a paired difference between two arms that are the same."""

    sd: float
    dof: int
    """Degrees of freedom: how well the SD is known."""
    interval: Interval
    """95 % interval of the SD, from chi-squared; exact for normal noise."""


def estimate_noise(scores: ArrayLike) -> Noise:
    """Return the noise of a paired difference, from A/A trials: the scores [S] of one arm, one for each seed.

    Two trials with different seeds stand for the two of a pair. If a seed decides much of a score in both arms alike, pairing
    leaves less noise than this, and a study finds more than was announced. Raises ValueError for fewer than two seeds, or for
    scores that are not finite.
    """
    values = np.asarray(scores, float)
    if len(values) < 2 or not np.isfinite(values).all():
        raise ValueError(f"the noise of seeds needs finite scores of at least two A/A trials (got {values.tolist()})")
    variance, dof = 2 * float(values.var(ddof=1)), len(values) - 1
    low, high = (math.sqrt(variance * dof / stats.chi2.ppf(q, dof)) for q in (0.975, 0.025))
    return Noise(sd=math.sqrt(variance), dof=dof, interval=Interval(low, high))
