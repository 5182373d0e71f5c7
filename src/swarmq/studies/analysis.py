"""What the results of a study say: its scores, its power, a look at it, its comparisons. Pure; a function of study and results.

Needs `swarmq[studies]`. Results are pairs of a trial and its result, in any order: nothing here depends on when a trial ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from swarmq.studies.design import choose_arms
from swarmq.studies.records import Trial, TrialResult
from swarmq.studies.statistics import (
    ArmComparison,
    Interval,
    Noise,
    Plan,
    Rule,
    adjust_p,
    compare_arms,
    estimate_noise,
    paired_power,
    plan,
    power_with_looks,
    t_interval,
)
from swarmq.studies.statistics.verdicts import Scores
from swarmq.studies.study import Study

Results = Sequence[tuple[Trial, TrialResult]]
MAX_SEEDS_WITH_LOOKS = 200
"""Largest number of seeds for which the power of a study with looks is simulated."""


def rule_of(study: Study) -> Rule:
    return Rule(
        smallest_effect=study.smallest_effect,
        alpha=study.stopping.alpha,
        higher_is_better=study.metric.direction == "maximize",
        looks=study.stopping.kind == "anytime",
    )


def collect_scores(study: Study, results: Results) -> dict[str, dict[int, dict[str, float]]]:
    """Return the scores of arms by seed and task, of the highest rung alone, the arms of the study file first.

    A result has a score for each held-out task where the metric is the mean of these; else the metric is its only score.
    """
    compared = [(trial, result) for trial, result in results if trial.purpose == "compare"]
    top = max((trial.rung for trial, _ in compared), default=0)
    found: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in study.arms}
    for trial, result in sorted(compared, key=lambda pair: (pair[0].arm, pair[0].seed)):
        if trial.rung == top:
            found.setdefault(trial.arm, {})[trial.seed] = _scores(study, result)
    return found


def compare(study: Study, results: Results) -> list[ArmComparison]:
    """Compare each arm with the first one, the baseline."""
    scores: dict[str, Scores] = {**collect_scores(study, results)}
    if not scores:
        return []
    dropped = max(_num_arms(study) - len(scores), 0)
    return compare_arms(scores, next(iter(scores)), study.seeds, rule_of(study), dropped=dropped)


class MainEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Mean difference of the metric between the two values of a setting, over all arms of a factorial design."""

    factor: str
    low: Any
    high: Any
    seeds: int
    """Number of seeds for which every arm has a result."""
    mean: float
    interval: Interval
    p_holm: float


def main_effects(study: Study, results: Results) -> list[MainEffect]:
    """Return the effect of each setting of a factorial design with two values each; none for other designs."""
    if not study.space or study.design.kind not in ("grid", "sequential", "fractional"):
        return []
    if any(len(parameter.values) != 2 for parameter in study.space.values()):
        return []
    arms = choose_arms(study)
    scores = collect_scores(study, results)
    seeds = [seed for seed in study.seeds if all(seed in scores.get(arm, {}) for arm in arms)]
    if not seeds:
        return []
    means = np.array([[fmean(scores[arm][seed].values()) for arm in arms] for seed in seeds])
    differences = []
    for path, parameter in study.space.items():
        is_high = np.array([arm.settings[path] == parameter.values[1] for arm in arms.values()])
        differences.append(means[:, is_high].mean(1) - means[:, ~is_high].mean(1))
    adjusted = adjust_p(differences, Rule(smallest_effect=study.smallest_effect))
    return [
        MainEffect(
            factor=path,
            low=parameter.values[0],
            high=parameter.values[1],
            seeds=len(seeds),
            mean=float(difference.mean()),
            interval=t_interval(difference, alpha=study.stopping.alpha),
            p_holm=p_holm,
        )
        for (path, parameter), difference, (_, p_holm) in zip(study.space.items(), differences, adjusted, strict=True)
    ]


def measure_noise(study: Study, results: Results) -> Noise | None:
    """Return the noise of seeds by the A/A trials; None for fewer than two results."""
    scores = [result.metrics[study.metric.name] for trial, result in results if trial.purpose == "noise"]
    return estimate_noise(sorted(scores)) if len(scores) > 1 else None


def plan_power(study: Study, noise: Noise) -> Plan:
    """Say what the study can find, and how many seeds would be enough. If it looks early, its power is simulated."""
    stopping, num_seeds = study.stopping, len(study.seeds)
    comparisons = _num_comparisons(study)
    found = plan(
        study.smallest_effect, noise, num_seeds, comparisons=comparisons, alpha=stopping.alpha, power=stopping.power
    )
    if stopping.kind == "fixed":
        return found
    needed = found.seeds_needed
    while needed <= MAX_SEEDS_WITH_LOOKS and _looks(study, noise, needed, found.alpha) < stopping.power:
        needed = needed + max(1, needed // 10)
    return Plan(
        effect=found.effect,
        noise=noise,
        alpha=found.alpha,
        seeds=num_seeds,
        power=_looks(study, noise, num_seeds, found.alpha),
        seeds_needed=needed,
    )


def announce_power(study: Study, results: Results = ()) -> str:
    """Say in a sentence what the study can find: before any A/A trial, up to which noise."""
    noise = measure_noise(study, results)
    if noise is not None:
        return plan_power(study, noise).sentence()
    level = study.stopping.alpha / _num_comparisons(study)
    sd = _largest_sd(study, level)
    how = (
        f"its {study.noise_trials} A/A trials will measure it"
        if study.noise_trials > 1
        else f"set noise_trials{' to 2 or more' if study.noise_trials else ''} to measure it"
    )
    if not sd:
        return f"{len(study.seeds)} seed finds no effect: a comparison needs at least two."
    return (
        f"{len(study.seeds)} seeds find an effect of {study.smallest_effect:g} with probability {study.stopping.power:g} "
        f"if a paired difference has an SD of at most {sd:.3g}; {how}."
    )


def look(study: Study, results: Results) -> tuple[dict[str, float], str, str]:
    """Look at the whole seeds so far: figures by name, `stop` or `continue`, and why."""
    comparisons = compare(study, results)
    figures: dict[str, float] = {}
    for found in comparisons:
        if found.mean is not None and math.isfinite(found.interval.low):
            figures |= {
                f"{found.arm}.difference": found.mean,
                f"{found.arm}.low": found.interval.low,
                f"{found.arm}.high": found.interval.high,
            }
        figures |= {f"{found.arm}.p_holm": found.p_holm, f"{found.arm}.seeds": float(len(found.seeds))}
    open_arms = [found.arm for found in comparisons if found.verdict == "undecided"]
    if not comparisons or open_arms:
        return figures, "continue", f"undecided: {', '.join(open_arms) or 'no arm has results'}"
    return figures, "stop", "; ".join(f"{found.arm}: {found.verdict}" for found in comparisons)


def _scores(study: Study, result: TrialResult) -> dict[str, float]:
    value = result.metrics[study.metric.name]
    if result.scores and math.isclose(math.fsum(result.scores.values()) / len(result.scores), value, abs_tol=1e-9):
        return result.scores
    return {study.metric.name: value}


def _num_comparisons(study: Study) -> int:
    """Return over how many arms Holm's correction holds the level, with all that a sampler or a planner may add."""
    return max(_num_arms(study) - 1 + study.planner.max_arms, 1)


def _num_arms(study: Study) -> int:
    return study.design.num_arms if study.design.kind == "optuna" else len(choose_arms(study))


def _looks(study: Study, noise: Noise, seeds: int, alpha: float) -> float:
    return power_with_looks(study.smallest_effect, noise.sd, seeds, alpha=alpha, dof=noise.dof, draws=4_000)[0]


def _largest_sd(study: Study, alpha: float) -> float:
    """Return the largest SD with which the study still has its power, or 0; by bisection."""
    seeds, effect = len(study.seeds), study.smallest_effect

    def power(sd: float) -> float:
        if study.stopping.kind == "anytime":
            return power_with_looks(effect, sd, seeds, alpha=alpha, draws=4_000)[0]
        return paired_power(effect, sd, seeds, alpha=alpha)

    low, high = effect * 1e-3, effect * 100
    if power(low) < study.stopping.power:
        return 0.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if power(middle) >= study.stopping.power else (low, middle)
    return low
