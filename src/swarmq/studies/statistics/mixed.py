"""The mixed model of seeds and tasks: whether an effect also holds for new tasks, not only for new seeds."""

from __future__ import annotations

import math
import warnings

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM

from swarmq.studies.statistics.intervals import Interval, are_equal


class MixedEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Mean difference of an arm with seeds and tasks both drawn at random; SDs in the unit of the metric."""

    mean: float
    interval: Interval
    p: float
    sd_seed: float
    sd_task: float
    sd_residual: float
    converged: bool


def mixed_effect(differences: ArrayLike, *, alpha: float = 0.05) -> MixedEffect | None:
    """Fit difference [S, T] = mean + seed + task + residual by REML (Laird and Ware 1982; Baayen, Davidson, Bates 2008).

    NaN marks a pair without a result. Degrees of freedom are those of the smaller of the two samples, which is conservative.
    Returns None for fewer than two seeds or tasks, or if all differences are equal.
    """
    values = np.asarray(differences, float)
    seeds, tasks = np.nonzero(np.isfinite(values))
    flat = values[seeds, tasks]
    if min(len(set(seeds)), len(set(tasks))) < 2 or are_equal(flat):
        return None
    scale = float(flat.std())  # the optimizer's tolerance is absolute
    frame = pd.DataFrame({"difference": flat / scale, "seed": seeds, "task": tasks, "study": 0})
    parts = {"seed": "0 + C(seed)", "task": "0 + C(task)"}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a variance of 0 is an answer here; `converged` says whether it can be believed
        fit = MixedLM.from_formula("difference ~ 1", frame, groups="study", vc_formula=parts).fit(reml=True)
    mean, error = (scale * float(found.iloc[0]) for found in (fit.fe_params, fit.bse_fe))
    dof = min(len(set(seeds)), len(set(tasks))) - 1
    half = float(stats.t.ppf(1 - alpha / 2, dof)) * error
    by_name = dict(zip(fit.model.exog_vc.names, map(float, fit.vcomp), strict=True))
    return MixedEffect(
        mean=mean,
        interval=Interval(mean - half, mean + half),
        p=float(2 * stats.t.sf(abs(mean / error), dof)) if error > 0 else 0.0,
        sd_seed=scale * math.sqrt(by_name["seed"]),
        sd_task=scale * math.sqrt(by_name["task"]),
        sd_residual=scale * math.sqrt(float(fit.scale)),
        converged=bool(fit.converged),
    )
