"""Metrics that fall or rise over the steps of a run by more than chance: a falling reward, fewer turns, shorter or longer
answers. Pure.

The test is Mann and Kendall's: among all pairs of steps, is the later one lower more often than in a series without a trend? It
assumes nothing about the distribution of the noise, and an outlier counts as one step. It is applied to the newest `WINDOW`
steps, and to the means of the newest `WINDOW` blocks of `BLOCK` steps, which shows slow trends. A trend is a warning
sign if its z-score is beyond `Z` and the change is large enough to matter. A learner tests after every step: with `Z` = 4,
uncorrelated noise caused a sign in 0 of 100 trainings of 200 steps, noise correlated from step to step by 30 % in 4, and by 50 %
in 32; a test measures the first two.

Harmless changes are excluded: rewards are compared kind by kind, so that a changed mix is no trend; no step is compared with
steps before the newest client code; and fewer turns, shorter or longer answers and less entropy are expected while the reward
rises.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmq.learner.health.findings import Finding

WINDOW, BLOCK = 40, 8
MIN_POINTS = 12
"""Minimum number of points from which a trend is computed."""
MAX_STEPS = WINDOW * BLOCK
"""Maximum number of newest steps that are examined."""
Z = 4.0
MIN_RISE_Z = 2.0
"""z-score above which the reward counts as rising. A rising reward suppresses warnings, which needs less proof than a warning
(`Z`)."""
OTHER_MIX = 3.0
"""z-score beyond which a kind's share counts as changed, so that the changed mix explains trends over all kinds."""
TINY = 1e-6

Steps = Sequence[Mapping[str, Any]]
Measure = Callable[[Mapping[str, Any]], float | None]


Floats = NDArray[np.float64]


class Fit(msgspec.Struct, frozen=True):
    """A fitted trend of a metric over some steps."""

    z: float
    begin: float
    """Value at the beginning of the fitted Theil-Sen line."""
    end: float
    change: float
    """Relative change from `begin` to `end`."""
    first: int
    """Weight version of the first step."""
    last: int


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    measured: str
    measure: Measure
    change: float
    """Threshold of the relative change over the fitted line, beyond which the trend is a warning sign; negative for a fall."""
    alone: bool = False
    """Whether the trend is a warning sign even while the reward rises or the mix changes."""
    advice: str


def share(name: str, of: str) -> Measure:
    def ratio(step: Mapping[str, Any]) -> float | None:
        count, total = _figure(step, name), _figure(step, of)
        return None if count is None or not total else count / total

    return ratio


def _figure(step: Mapping[str, Any], name: str) -> float | None:
    value = step.get(name)
    return float(value) if value is not None and math.isfinite(value) else None


def entropy(step: Mapping[str, Any]) -> float | None:
    return _figure(step, "entropy")


LOOK = "compare episodes of early and late steps (swarmq inspect RUN --step N)"
TRENDS = (
    Trend(
        name="fewer turns", measured="turns per episode", measure=share("turns", "episodes"), change=-0.25,
        advice=f"agents call the model less often, and the reward does not rise: do they give up early, or without their tools? {LOOK}; "
        "if the reward pays for fewer turns, change it",
    ),
    Trend(
        name="fewer episodes", measured="episodes per group", measure=share("episodes", "groups"), change=-0.25, alone=True,
        advice="groups lose members that fail or never end (unless groups.group_size was set lower): look at `dropped` in swarmq "
        "status and at the workers' logs",
    ),
    Trend(
        name="shorter answers", measured="tokens per turn", measure=share("tokens_sampled", "turns"), change=-0.33,
        advice=f"answers shrink, and the reward does not rise: {LOOK}; a length penalty, or normalisation by length, may pay for silence",
    ),
    Trend(
        name="longer answers", measured="tokens per turn", measure=share("tokens_sampled", "turns"), change=0.5,
        advice=f"answers grow, and the reward does not rise: {LOOK}; set length_penalty, or normalisation = 'constant'",
    ),
    Trend(
        name="falling entropy", measured="entropy", measure=entropy, change=-0.25,
        advice="the policy tries fewer things, and the reward does not rise: lower the learning rate, raise clip_high, or mix in other tasks",
    ),
)  # fmt: skip
REWARD = Trend(
    name="falling reward", measured="reward", measure=lambda step: _figure(step, "reward"), change=-0.1, alone=True,
    advice=f"the policy gets worse at these tasks, or they get harder: {LOOK}; lower the learning rate, and continue from a checkpoint "
    "before the fall",
)  # fmt: skip


def find_trends(steps: Steps, *, only_signs: bool = False) -> Iterator[Finding]:
    """Yield one finding for every trend with enough steps, or only for those that are signs."""
    steps = steps[-MAX_STEPS:]
    steps = steps[_newest_code(steps) :]
    windows = [_Window(steps, block) for block in (1, BLOCK)]
    for trend in (REWARD, *TRENDS):
        tested = [(window, result) for window in windows if (result := _test(trend, window)) is not None]
        shown = next((fit for window, result in tested if (fit := _sign(trend, window, *result))), None)
        if shown:
            yield _describe_trend(trend, shown, is_sign=True)
        elif tested and not only_signs:
            window, (values, z) = tested[0]
            yield _describe_trend(trend, _fit(trend, window, values, z), is_sign=False)


def reward_rises(steps: Steps) -> bool:
    """Return whether the reward rises over the newest steps."""
    steps = steps[-WINDOW:]
    return mann_kendall(_Window(steps[_newest_code(steps) :], 1).rewards) > MIN_RISE_Z


class _Window:
    """The newest steps, grouped in blocks."""

    def __init__(self, steps: Steps, block: int) -> None:
        self.steps = steps[-WINDOW * block :][len(steps[-WINDOW * block :]) % block :]
        self.block = block
        self.rewards = self.points(_reward_of(self.steps)) if len(self.steps) >= MIN_POINTS * block else []

    def points(self, measure: Measure) -> list[float]:
        """Return means over blocks of steps, without blocks that lack the metric."""
        values = [measure(step) for step in self.steps]
        blocks = (values[at : at + self.block] for at in range(0, len(values), self.block))
        known = ([value for value in each if value is not None] for each in blocks)
        return [statistics.fmean(each) for each in known if each]

    def explains(self) -> bool:
        """Return whether a rising reward or a changed mix of kinds explains trends of other metrics."""
        return mann_kendall(self.rewards) > MIN_RISE_Z or any(
            abs(mann_kendall(self.points(_share_of(kind)))) > OTHER_MIX
            for kind in {kind for step in self.steps for kind in step.get("groups_by_kind") or {}}
        )


def _test(trend: Trend, window: _Window) -> tuple[list[float], float] | None:
    """Return the points and z-score of a trend, or None if there are too few points."""
    if len(window.steps) < MIN_POINTS * window.block:
        return None
    values = window.rewards if trend is REWARD else window.points(trend.measure)
    return (values, mann_kendall(values)) if len(values) >= MIN_POINTS else None


def _sign(trend: Trend, window: _Window, values: Sequence[float], z: float) -> Fit | None:
    if not z * math.copysign(1.0, trend.change) > Z or not (trend.alone or not window.explains()):
        return None
    fit = _fit(trend, window, values, z)
    return fit if fit.change / trend.change >= 1 else None


def _fit(trend: Trend, window: _Window, values: Sequence[float], z: float) -> Fit:
    if trend is REWARD:
        begin, end = _line(values)
        base = max(abs(begin), abs(end))  # a reward may be of either sign
    else:
        begin, end = map(math.exp, _line([math.log(max(value, TINY)) for value in values]))
        base = begin
    first, last = (int(window.steps[place].get("version", 0)) for place in (0, -1))
    return Fit(z, begin, end, (end - begin) / base if base else 0.0, first, last)


def mann_kendall(values: Sequence[float]) -> float:
    """Return the z-score of Mann and Kendall's trend test, positive if the values rise; ties are accounted for."""
    n = len(values)
    total = float(np.sign(_pairs(values)).sum())
    ties = sum(count * (count - 1) * (2 * count + 5) for count in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    return 0.0 if not total or not variance else (total - math.copysign(1.0, total)) / math.sqrt(variance)


def _pairs(values: Sequence[float]) -> Floats:
    """Return, for each pair, the later value minus the earlier."""
    earlier, later = _places(len(values))
    array = np.array(values, np.float64)
    found: Floats = array[later] - array[earlier]
    return found


@functools.cache
def _places(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return, for all pairs of `count` values, the indices of the earlier and of the later value."""
    earlier, later = np.triu_indices(count, 1)
    return earlier, later


def _line(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and last value of the Theil-Sen line, which has the median slope of all pairs."""
    earlier, later = _places(len(values))
    slope = float(np.median(_pairs(values) / (later - earlier)))
    height = statistics.median(value - slope * place for place, value in enumerate(values))
    return height, height + slope * (len(values) - 1)


def _share_of(kind: str) -> Measure:
    """Return a measure: the kind's share of the groups."""

    def part(step: Mapping[str, Any]) -> float | None:
        groups = step.get("groups_by_kind") or {}
        return groups.get(kind, 0) / sum(groups.values()) if groups else None

    return part


def _reward_of(steps: Steps) -> Measure:
    """Return a measure: the mean reward over the kinds that every step has, each with the same weight; over all episodes if there is no
    such kind."""
    each = [{kind for kind, value in (step.get("reward_by_kind") or {}).items() if value is not None} for step in steps]
    kinds = set.intersection(*each) if each else set()

    def reward(step: Mapping[str, Any]) -> float | None:
        values = [float(step["reward_by_kind"][kind]) for kind in kinds]
        return statistics.fmean(values) if values and all(map(math.isfinite, values)) else _figure(step, "reward")

    return reward


def _newest_code(steps: Steps) -> int:
    """Return the index of the first step with the newest version of client code; 0 if no step names a version."""
    known: set[str] = set()
    place = 0
    for number, step in enumerate(steps):
        versions = step.get("code_versions") or {}
        if known and versions.keys() - known:
            place = number
        known |= versions.keys()
    return place


def _describe_trend(trend: Trend, fit: Fit, *, is_sign: bool) -> Finding:
    """Return a finding that describes a trend by the ends of its fitted line, which are seldom the first and last value."""
    seen = f"{trend.measured} {fit.begin:.3g} -> {fit.end:.3g} from step {fit.first} to {fit.last}"
    limit = f"{trend.change:+.0%} and z {'below -' if trend.change < 0 else 'above '}{Z:g}"
    if is_sign:
        text = f"{seen} ({fit.change:+.0%}, z {fit.z:.1f}; a sign from {limit} on): {trend.advice}"
        return Finding(level="warning", check=trend.name, text=text)
    return Finding(
        level="ok", check=trend.name, text=f"{seen} (z {fit.z:.1f}; {trend.name} from {limit} on)", named=False
    )
