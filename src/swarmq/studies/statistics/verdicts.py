"""From scores to what a study may claim: pairs, a comparison of each arm with the baseline, Holm's correction, verdicts.

Reports, stopping rules and the simulated studies of benchmarks/studies_aa.py all decide by `compare_arms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmq.studies.statistics.intervals import (
    Interval,
    bootstrap_interval,
    permutation_interval,
    permutation_p,
    t_interval,
    t_test_p,
)
from swarmq.studies.statistics.looks import anytime_p, confidence_sequence
from swarmq.studies.statistics.mixed import MixedEffect, mixed_effect

Scores = Mapping[int, Mapping[str, float]]
"""Score of each task, by seed, of one arm."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How a study decides; fixed before the first trial."""

    smallest_effect: float
    alpha: float = 0.05
    higher_is_better: bool = True
    looks: bool = False
    """Whether the study may stop early, and so decides by e-values; else by t-tests, once, after all seeds."""


class ArmComparison(msgspec.Struct, frozen=True, kw_only=True):
    """An arm against the baseline; differences are arm minus baseline."""

    arm: str
    seeds: list[int]
    """Seeds that both have, in the order of the study file."""
    tasks: int
    """Tasks that every one of these pairs has."""
    differences: list[float]
    """Mean difference over tasks, of each seed."""
    mean: float | None
    interval: Interval
    """By which the study decides: Student's, or the confidence sequence of a study with looks."""
    bootstrap: Interval
    permutation: Interval
    p: float
    p_permutation: float
    p_holm: float
    """p-value after Holm's correction over all arms."""
    mixed: MixedEffect | None
    verdict: Literal["better", "worse", "no effect of interest", "undecided"]


def compare_arms(
    scores: Mapping[str, Scores], baseline: str, seeds: Sequence[int], rule: Rule, *, dropped: int = 0
) -> list[ArmComparison]:
    """Compare each arm with the baseline, in the order of `scores`. Scores that are missing leave their pair out. `dropped`: number of
    further arms that were tried and not promoted; Holm's correction counts them, because the others were chosen among them."""
    arms = [arm for arm in scores if arm != baseline]
    paired = {arm: pair(scores[arm], scores[baseline], seeds) for arm in arms}
    means = {arm: matrix.mean(axis=1) if found else np.empty(0) for arm, (found, matrix) in paired.items()}
    return [
        _compare(arm, *paired[arm], means[arm], rule=rule, p=p, p_holm=p_holm)
        for arm, (p, p_holm) in zip(arms, adjust_p(list(means.values()), rule, dropped=dropped), strict=True)
    ]


def adjust_p(differences: Sequence[NDArray[np.float64]], rule: Rule, *, dropped: int = 0) -> list[tuple[float, float]]:
    """Return the p-value of each arm's differences, before and after Holm's correction over all arms (Holm 1979). `dropped`: number
    of further arms, whose p-values are 1."""
    p = [anytime_p(differences) if rule.looks else t_test_p(differences) for differences in differences]
    adjusted, largest = p.copy(), 0.0
    for place, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, p[i] * (len(p) + dropped - place)))
        adjusted[i] = largest
    return [*zip(p, adjusted, strict=True)]


def pair(arm: Scores, baseline: Scores, seeds: Sequence[int]) -> tuple[list[int], NDArray[np.float64]]:
    """Return the seeds that both have and their differences [S, T] on the tasks that all of these have."""
    both = [seed for seed in seeds if arm.get(seed) and baseline.get(seed)]
    tasks = sorted(set.intersection(*(set(side[seed]) for seed in both for side in (arm, baseline)))) if both else []
    if not tasks:
        return [], np.empty((0, 0))
    return both, np.array([[arm[seed][task] - baseline[seed][task] for task in tasks] for seed in both])


def _compare(
    arm: str,
    seeds: list[int],
    matrix: NDArray[np.float64],
    differences: NDArray[np.float64],
    *,
    rule: Rule,
    p: float,
    p_holm: float,
) -> ArmComparison:
    mean = float(differences.mean()) if seeds else None
    interval = (confidence_sequence if rule.looks else t_interval)(differences, alpha=rule.alpha)
    return ArmComparison(
        arm=arm,
        seeds=seeds,
        tasks=matrix.shape[1],
        differences=differences.tolist(),
        mean=mean,
        interval=interval,
        bootstrap=bootstrap_interval(differences, alpha=rule.alpha),
        permutation=permutation_interval(differences, alpha=rule.alpha),
        p=p,
        p_permutation=permutation_p(differences),
        p_holm=p_holm,
        mixed=mixed_effect(matrix, alpha=rule.alpha) if seeds else None,
        verdict=_verdict(mean, interval, p_holm, rule),
    )


def _verdict(
    mean: float | None, interval: Interval, p_holm: float, rule: Rule
) -> Literal["better", "worse", "no effect of interest", "undecided"]:
    if mean is None:
        return "undecided"
    if p_holm <= rule.alpha:
        return "better" if (mean > 0) == rule.higher_is_better else "worse"
    return "no effect of interest" if interval.lies_within(rule.smallest_effect) else "undecided"
