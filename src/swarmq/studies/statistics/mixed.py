"""The mixed model of seeds and tasks: whether an effect also holds for new tasks, not only for new seeds."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from swarmq.studies.statistics.intervals import Interval, are_equal


class MixedEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Mean difference of an arm with seeds and tasks both drawn at random; SDs in the unit of the metric."""

    mean: float
    interval: Interval
    p: float
    sd_seed: float
    sd_task: float
    sd_residual: float


def mixed_effect(differences: ArrayLike, *, alpha: float = 0.05) -> MixedEffect | None:
    """Fit difference [S, T] = mean + seed + task + residual by REML (Laird and Ware 1982; Baayen, Davidson, Bates 2008).

    Every seed has every task, so REML needs no optimizer, whose last digits would depend on the machine: it is the analysis of
    variance, with mean squares below the residual's pooled with it (Thompson 1962). Degrees of freedom are those of the smaller of
    the two samples, which is conservative. Returns None for fewer than two seeds or tasks, or if all differences are equal.
    """
    values = np.asarray(differences, float)
    if min(values.shape) < 2 or are_equal(values):
        return None
    seeds, tasks = values.shape
    mean, by_seed, by_task = float(values.mean()), values.mean(1), values.mean(0)
    square = {"seed": tasks * float(by_seed.var(ddof=1)), "task": seeds * float(by_task.var(ddof=1))}
    freedom = {"seed": seeds - 1, "task": tasks - 1}
    rest = (seeds - 1) * (tasks - 1)
    residual = float(((values - by_seed[:, None] - by_task + mean) ** 2).sum()) / rest
    for part in sorted(square, key=square.__getitem__):
        if square[part] < residual:
            residual = (residual * rest + square[part] * freedom[part]) / (rest + freedom[part])
            rest += freedom[part]
    square = {part: max(found, residual) for part, found in square.items()}
    error = math.sqrt((square["seed"] + square["task"] - residual) / (seeds * tasks))
    dof = min(freedom.values())
    half = float(stats.t.ppf(1 - alpha / 2, dof)) * error
    return MixedEffect(
        mean=mean,
        interval=Interval(mean - half, mean + half),
        p=float(2 * stats.t.sf(abs(mean / error), dof)),
        sd_seed=math.sqrt((square["seed"] - residual) / tasks),
        sd_task=math.sqrt((square["task"] - residual) / seeds),
        sd_residual=math.sqrt(residual),
    )
