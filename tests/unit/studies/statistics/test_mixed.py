"""The mixed model against statsmodels, and against the definition of its likelihood."""

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM

from swarmq.studies.statistics import mixed_effect


def draw(sd_seed, sd_task, seeds=8, tasks=10):
    """Differences whose parts have the SDs that are given, so that the mean square of an SD of 0 is below the residual's."""
    rng = np.random.default_rng(0)
    by_seed, by_task, values = (rng.normal(size=shape) for shape in ((seeds, 1), (1, tasks), (seeds, tasks)))
    values -= values.mean(1, keepdims=True) + values.mean(0) - values.mean()
    return 0.1 + sd_seed * by_seed + sd_task * by_task + values


def fit(values):
    """Return mean, its error, and the SDs of seeds, tasks and residual, as statsmodels' optimizer finds them."""
    seeds, tasks = np.indices(values.shape)
    frame = pd.DataFrame({"y": values.ravel(), "seed": seeds.ravel(), "task": tasks.ravel(), "study": 0})
    parts = {"seed": "0 + C(seed)", "task": "0 + C(task)"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its optimizer
        found = MixedLM.from_formula("y ~ 1", frame, groups="study", vc_formula=parts).fit(reml=True)
    sds = np.sqrt([*found.vcomp, found.scale])
    return [float(found.fe_params.iloc[0]), float(found.bse_fe.iloc[0]), *sds]


def test_the_mixed_model_is_that_of_statsmodels():
    values = draw(1.0, 2.0)
    found = mixed_effect(values)
    error = (found.interval.high - found.interval.low) / 2 / stats.t.ppf(0.975, len(values) - 1)
    shown = [found.mean, error, found.sd_seed, found.sd_task, found.sd_residual]
    assert shown == pytest.approx(fit(values), rel=1e-2, abs=1e-2)


def restricted_likelihood(values, variances):
    """Log of the restricted likelihood of the variances of seeds, tasks and residual, by the matrices of its definition."""
    seeds, tasks = values.shape
    blocks = np.kron(np.eye(seeds), np.ones((tasks, tasks))), np.kron(np.ones((seeds, seeds)), np.eye(tasks))
    covariance = variances[0] * blocks[0] + variances[1] * blocks[1] + variances[2] * np.eye(values.size)
    inverse, ones = np.linalg.inv(covariance), np.ones(values.size)
    weight = ones @ inverse @ ones
    rest = values.ravel() - ones @ inverse @ values.ravel() / weight
    return -(np.linalg.slogdet(covariance)[1] + np.log(weight) + rest @ inverse @ rest) / 2


@pytest.mark.parametrize("sds", [(1.0, 2.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_no_other_sds_are_more_likely_also_where_one_is_0(sds):
    values = draw(*sds, seeds=5, tasks=4)
    found = mixed_effect(values)
    best = np.square([found.sd_seed, found.sd_task, found.sd_residual])
    assert [bool(sd) for sd in best[:2]] == [bool(sd) for sd in sds]
    for step in itertools.product((-0.02, 0.0, 0.02), repeat=3):
        other = np.maximum(best + step, [0, 0, 1e-3])
        assert restricted_likelihood(values, other) <= restricted_likelihood(values, best) + 1e-9


def test_an_effect_on_few_of_the_tasks_holds_for_these_tasks_only():
    """Every seed agrees, so that the seeds alone are sure; new tasks may show nothing."""
    rng = np.random.default_rng(1)
    values = np.zeros((6, 5)) + rng.normal(0, 0.01, (6, 5))
    values[:, 0] += 1.0
    found = mixed_effect(values)
    assert abs(values.mean(1)).min() > 0.15
    assert found.interval.low < 0 < found.interval.high


@pytest.mark.parametrize("values", [np.zeros((4, 4)), np.ones((1, 5)), [[0.1], [0.2]], np.empty((0, 0))])
def test_fewer_than_two_seeds_or_tasks_have_no_mixed_model(values):
    assert mixed_effect(values) is None
