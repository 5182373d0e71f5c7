"""Which trials come next. Pure, given the maker of trials: the same ledger gives the same trials.

grid, fractional, random   every arm with every seed, at once
sequential       one seed of every arm, then the next
halving          all arms at the first rung; when a rung is complete, its best arms go on, and the baseline
asha             an arm goes on as soon as it is among the best of those that have come as far
optuna           one arm after the other, proposed by a sampler that is told all results
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

from swarmq.studies.factorial import fractional
from swarmq.studies.records import AnyFact, Looked, Promoted, StudyStopped, Trial, TrialPlanned
from swarmq.studies.state import StudyState, TrialState
from swarmq.studies.study import Arm, Parameter, Study

MakeTrial = Callable[..., Trial]
"""`TrialMaker.make`"""
MAX_PROPOSALS = 10
"""Number of proposals of a sampler after which the search ends, because all were tried before."""


def plan_next(state: StudyState, make: MakeTrial) -> list[AnyFact]:
    """Return the trials that the design adds now, and promotions. An empty list: nothing until another trial is settled."""
    study = state.study
    assert study is not None
    facts: list[AnyFact] = []
    facts += _plan_noise(state, make)
    match study.design.kind:
        case "grid" | "fractional" | "random":
            facts += _plan_seeds(state, choose_arms(study) | state.added_arms, study.seeds, make)
        case "sequential":
            facts += _plan_seed_by_seed(state, make)
        case "halving" | "asha":
            facts += _plan_rungs(state, make)
        case "optuna":
            facts += _plan_sampled(state, make)
    return facts


def look_next(state: StudyState) -> list[AnyFact]:
    """Return a look at the results, and the stop that it leads to, if the stopping rule asks for one now."""
    study = state.study
    assert study is not None
    whole = _count_whole_seeds(state)
    if study.stopping.kind == "fixed" or whole < (len(state.looks) + 1) * study.stopping.look_every:
        return []
    from swarmq.studies.analysis import look  # noqa: PLC0415 - an extra

    figures, decision, reason = look(study, results := state.results)
    looked = Looked(
        look=len(state.looks) + 1,
        num_results=sum(trial.purpose == "compare" for trial, _ in results),  # an A/A trial ends at any time
        figures=figures,
        decision="stop" if decision == "stop" else "continue",
        reason=reason,
    )
    return [looked, StudyStopped(kind="rule", reason=reason)] if decision == "stop" else [looked]


def _count_whole_seeds(state: StudyState) -> int:
    assert state.study is not None
    compared = [one for one in state.trials.values() if one.trial.purpose == "compare"]
    open_seeds = {one.trial.seed for one in compared if not one.is_settled}
    return len({one.trial.seed for one in compared} - open_seeds)


def choose_arms(study: Study) -> dict[str, Arm]:
    """Return the arms of a study: those of its file, or of its search space."""
    if study.arms:
        return study.arms
    if study.design.kind in ("grid", "sequential"):
        paths = list(study.space)
        combinations = itertools.product(*(study.space[path].values for path in paths))
        drawn = [dict(zip(paths, values, strict=True)) for values in combinations]
    elif study.design.kind == "fractional":
        drawn = [
            {path: parameter.values[level] for (path, parameter), level in zip(study.space.items(), row, strict=True)}
            for row in fractional(len(study.space), study.design.num_arms)
        ]
    else:
        chance = random.Random(study.design.seed)
        drawn = [
            {path: _draw(parameter, chance) for path, parameter in study.space.items()}
            for _ in range(study.design.num_arms)
        ]
    return {_name(number): Arm(settings=settings) for number, settings in enumerate(drawn, 1)}


def _name(number: int) -> str:
    return f"arm-{number:03d}"


def _draw(parameter: Parameter, chance: random.Random) -> Any:
    if parameter.values:
        return chance.choice(parameter.values)
    low, high = parameter.low, parameter.high
    assert low is not None and high is not None  # noqa: PT018 - checked by the study
    value = math.exp(chance.uniform(math.log(low), math.log(high))) if parameter.log else chance.uniform(low, high)
    return round(value) if parameter.whole else value


def _plan_noise(state: StudyState, make: MakeTrial) -> Iterator[AnyFact]:
    """Yield the A/A trials that are not planned yet, with seeds that no planned one has."""
    study = state.study
    assert study is not None
    name, baseline = next(iter(choose_arms(study).items()))
    planned = [one.trial.seed for one in state.trials.values() if one.trial.purpose == "noise"]
    first = max([*study.seeds, *planned]) + 1
    for seed in range(first, first + study.noise_trials - len(planned)):
        yield TrialPlanned(trial=make(name, baseline, seed, purpose="noise"))


def _plan_seeds(state: StudyState, arms: dict[str, Arm], seeds: tuple[int, ...], make: MakeTrial) -> Iterator[AnyFact]:
    """Yield the trials of these arms and seeds, at the first rung, that are not planned yet."""
    planned = {one.trial.id for one in state.newest}
    for seed, (name, arm) in itertools.product(seeds, arms.items()):
        trial = make(name, arm, seed)
        if trial.id not in planned:
            planned.add(trial.id)
            yield TrialPlanned(trial=trial)


def _plan_seed_by_seed(state: StudyState, make: MakeTrial) -> Iterator[AnyFact]:
    assert state.study is not None
    for seed in state.study.seeds:
        if new := [*_plan_seeds(state, choose_arms(state.study) | state.added_arms, (seed,), make)]:
            yield from new
            return
        if not all(one.is_settled for one in state.trials.values() if one.trial.seed == seed):
            return


def _plan_rungs(state: StudyState, make: MakeTrial) -> Iterator[AnyFact]:
    study = state.study
    assert study is not None
    arms = choose_arms(study)
    yield from _plan_seeds(state, arms, study.seeds, make)
    for rung in range(len(study.design.rungs) - 1):
        entered = [name for name in arms if any(_at(state, name, rung))]
        ranked = _rank(state, [name for name in entered if all(one.is_settled for one in _at(state, name, rung))], rung)
        if study.design.kind == "halving":
            if len(ranked) < len(entered) or not entered:
                return
            best = ranked[: math.ceil(len(ranked) * study.design.keep)]
        else:
            best = ranked[: math.floor(len(ranked) * study.design.keep)]
        # The baseline goes along, so that the arms that are left are compared with it.
        for name in [*best, *(name for name in ranked if study.arms and name == next(iter(arms)) and name not in best)]:
            if not any(_at(state, name, rung + 1)):
                yield Promoted(arm=name, rung=rung + 1, rank=ranked.index(name) + 1, of=len(ranked))
                for seed in study.seeds:
                    yield TrialPlanned(trial=make(name, arms[name], seed, rung=rung + 1))


def _at(state: StudyState, arm: str, rung: int) -> list[TrialState]:
    return [
        one for one in state.newest if one.trial.purpose == "compare" and (one.trial.arm, one.trial.rung) == (arm, rung)
    ]


def _rank(state: StudyState, arms: list[str], rung: int) -> list[str]:
    """Return the arms, best first; those without any result come last."""
    assert state.study is not None
    sign = -1 if state.study.metric.direction == "maximize" else 1

    def place(name: str) -> float:
        values = _values(state, name, rung)
        return sign * fmean(values) if values else math.inf

    return sorted(arms, key=place)


def _values(state: StudyState, arm: str, rung: int) -> list[float]:
    assert state.study is not None
    found = [one for one in _at(state, arm, rung) if one.result is not None]
    return [
        one.result.metrics[state.study.metric.name]
        for one in sorted(found, key=lambda one: one.trial.seed)
        if one.result
    ]


def _plan_sampled(state: StudyState, make: MakeTrial) -> Iterator[AnyFact]:
    """Yield the trials of the next arm, once all trials of the arms before are settled."""
    study = state.study
    assert study is not None
    compared = [one for one in state.trials.values() if one.trial.purpose == "compare"]
    told = {one.trial.arm: {path: one.trial.settings[path] for path in study.space} for one in compared}
    if len(told) >= study.design.num_arms or not all(one.is_settled for one in compared):
        return
    from swarmq.studies.sampling import propose  # noqa: PLC0415 - an extra

    results = [(told[name], _values(state, name, 0)) for name in told]
    for attempt in range(MAX_PROPOSALS):
        arm = Arm(
            settings=propose(study, results, seed=study.design.seed + len(told) + attempt * study.design.num_arms)
        )
        new = [*_plan_seeds(state, {_name(len(told) + 1): arm}, study.seeds, make)]
        if len(new) == len(study.seeds):
            yield from new
            return
