"""The mixed model against the closed form of a balanced design."""

import numpy as np
import pytest

from swarmq.studies.statistics import mixed_effect


def draw(seeds=8, tasks=10, mean=0.1, seed=0):
    rng = np.random.default_rng(seed)
    return mean + rng.normal(0, 0.1, (seeds, 1)) + rng.normal(0, 0.2, (1, tasks)) + rng.normal(0, 0.15, (seeds, tasks))


def test_a_balanced_design_has_the_error_of_the_analysis_of_variance():
    values = draw()
    seeds, tasks = values.shape
    by_seed, by_task = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
    ms_seed = tasks * by_seed.var(ddof=1)
    ms_task = seeds * by_task.var(ddof=1)
    ms_residual = ((values - by_seed - by_task + values.mean()) ** 2).sum() / ((seeds - 1) * (tasks - 1))
    found = mixed_effect(values)
    assert found.converged
    assert found.mean == pytest.approx(values.mean(), abs=1e-4)
    assert found.sd_residual == pytest.approx(ms_residual**0.5, rel=1e-2)
    assert found.sd_seed == pytest.approx(((ms_seed - ms_residual) / tasks) ** 0.5, rel=2e-2)
    assert found.sd_task == pytest.approx(((ms_task - ms_residual) / seeds) ** 0.5, rel=2e-2)
    error = ((ms_seed + ms_task - ms_residual) / (seeds * tasks)) ** 0.5
    half = (found.interval.high - found.interval.low) / 2
    assert half == pytest.approx(2.3646 * error, rel=1e-2), (
        "7 degrees of freedom: one less than the fewer of seeds and tasks"
    )


def test_an_effect_on_few_of_the_tasks_holds_for_these_tasks_only():
    """Every seed agrees, so that the seeds alone are sure; new tasks may show nothing."""
    rng = np.random.default_rng(1)
    values = np.zeros((6, 5)) + rng.normal(0, 0.01, (6, 5))
    values[:, 0] += 1.0
    found = mixed_effect(values)
    assert abs(values.mean(1)).min() > 0.15
    assert found.interval.low < 0 < found.interval.high


def test_missing_pairs_are_left_out():
    values = draw()
    values[0, 0] = values[3, 2] = np.nan
    assert mixed_effect(values).mean == pytest.approx(np.nanmean(values), abs=0.02)


@pytest.mark.parametrize("values", [np.zeros((4, 4)), np.ones((1, 5)), [[0.1], [0.2]], np.empty((0, 0))])
def test_what_has_no_two_seeds_and_tasks_has_no_mixed_model(values):
    assert mixed_effect(values) is None
