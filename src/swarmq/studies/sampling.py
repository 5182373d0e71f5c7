"""Arms proposed by one of Optuna's samplers, by ask and tell. Nothing is stored: every proposal is computed from all results."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from swarmq.studies.study import Parameter, Study


def propose(study: Study, told: Sequence[tuple[dict[str, Any], Sequence[float]]], *, seed: int) -> dict[str, Any]:
    """Return the settings of the next arm. `told`: settings of each arm before, and its results, one for each seed. `seed`: of the
    sampler's random numbers."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {path: _to_distribution(parameter) for path, parameter in study.space.items()}
    sampler = getattr(optuna.samplers, study.design.sampler)(seed=seed)
    search = optuna.create_study(sampler=sampler, direction=study.metric.direction)
    for settings, values in told:
        state = optuna.trial.TrialState.COMPLETE if values else optuna.trial.TrialState.FAIL
        value = fmean(values) if values else None
        search.add_trial(optuna.trial.create_trial(params=settings, distributions=space, value=value, state=state))
    return dict(search.ask(space).params)


def _to_distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.values:
        return CategoricalDistribution(parameter.values)
    assert parameter.low is not None and parameter.high is not None  # noqa: PT018 - checked by the study
    if parameter.whole:
        return IntDistribution(round(parameter.low), round(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
