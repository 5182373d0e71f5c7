"""Early looks that do not inflate false discoveries: an e-process for the mean of paired differences.

The e-value after n seeds is the Bayes factor of a standard normal prior on effect / SD against no effect, with the right Haar
prior on the SD (Goenen et al. 2005). It is a nonnegative martingale under every normal null, so that it exceeds 1 / alpha at any time
with probability alpha at most (Ville 1939; Hendriksen, de Heide, Gruenwald 2021, arXiv 1807.09077; Perez-Ortiz et al. 2024,
arXiv 2208.07610). A study may look after each seed and stop. Seeds count in the order of the study file, never in the order
in which they finish, which may depend on their results.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swarmq.studies.statistics.intervals import UNBOUNDED, Interval


def e_values(differences: ArrayLike) -> NDArray[np.float64]:
    """Return the e-value after each seed; seeds are the last axis. The first is 1: one difference has no SD."""
    values = np.asarray(differences, float)
    n = np.arange(1, values.shape[-1] + 1)
    mean = np.cumsum(values, -1) / n
    # sums around the first value: differences that are all equal must give exactly 0
    centred = values - values[..., :1]
    squares = np.maximum(np.cumsum(centred**2, -1) - np.cumsum(centred, -1) ** 2 / n, 0)
    spread = 1 + n
    with np.errstate(divide="ignore", invalid="ignore"):
        x = n * mean**2 / squares  # t squared over its degrees of freedom
        growth = np.where(np.isinf(x), np.log(spread), np.log1p(x) - np.log1p(x / spread))
    growth = np.where(mean == 0, 0, growth)
    return np.where(n < 2, 1.0, np.exp(np.minimum(n / 2 * growth - np.log(spread) / 2, 700)))


def anytime_p(differences: ArrayLike) -> float:
    """Return a p-value that stays valid however often the study has looked: 1 over the largest e-value so far."""
    values = np.asarray(differences, float)
    return 1.0 if len(values) < 2 else float(min(1.0, 1 / e_values(values).max()))


def confidence_sequence(differences: ArrayLike, *, alpha: float = 0.05) -> Interval:
    """Return the interval of the means with e-values below 1 / alpha. The intervals of all looks together cover the mean with
    probability 1 - alpha."""
    values = np.asarray(differences, float)
    n = len(values)
    if n < 2:
        return UNBOUNDED
    spread = 1 + n
    ratio = (spread / alpha**2) ** (1 / n)
    if ratio >= spread:
        return UNBOUNDED
    half = math.sqrt((ratio - 1) / (1 - ratio / spread) * float(values.var()))
    return Interval(float(values.mean()) - half, float(values.mean()) + half)
