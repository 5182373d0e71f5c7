"""Intervals and means that clients, collector and learner compute alike: Wilson's interval, and means of users' metrics. Pure.

Users choose names and values of metrics freely, so both are bounded here before they reach logs, events, screens and trackers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Self

import msgspec

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""

MAX_METRICS = 64
"""Maximum number of metrics that are shown per task kind; further metrics are kept with their episodes only."""
MAX_METRIC_NAME = 80
"""Maximum number of characters of a metric's shown name."""
MAX_METRIC = 1e100
"""Largest absolute value of a metric; larger values are clipped, so that no sum of values overflows."""


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for the mean of n values between 0 and 1 (Wilson 1927); it is too wide unless all values are 0
    or 1."""
    centre = share + Z95**2 / (2 * n)
    spread = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    scale = 1 + Z95**2 / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


class MetricSum(msgspec.Struct, frozen=True, array_like=True):
    """Number and sum of the values of one metric, over the episodes that report it."""

    count: int = 0
    total: float = 0.0

    def __add__(self, other: Self) -> MetricSum:
        return MetricSum(self.count + other.count, self.total + other.total)

    @property
    def mean(self) -> float:
        return self.total / self.count


def shorten_name(name: str) -> str:
    """Return the name as it is shown. Long names are cut, with a suffix that keeps different names different."""
    if len(name) <= MAX_METRIC_NAME:
        return name
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:6]
    return f"{name[: MAX_METRIC_NAME - 7]}-{digest}"


def sum_metrics(episodes: Iterable[Mapping[str, float]]) -> dict[str, MetricSum]:
    """Return shown name -> number and sum of the values, over the metrics of many episodes. At most 2 * MAX_METRICS metrics
    of each episode are counted; the total number of names is not limited."""
    sums: dict[str, MetricSum] = {}
    for metrics in episodes:
        for name, value in islice(metrics.items(), 2 * MAX_METRICS):
            shown = shorten_name(name)
            one = MetricSum(1, min(max(value, -MAX_METRIC), MAX_METRIC))
            sums[shown] = sums.get(shown, MetricSum()) + one
    return sums


def bound_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the first MAX_METRICS metrics of one episode under the names that are shown."""
    return {name: one.total for name, one in islice(sum_metrics([metrics]).items(), MAX_METRICS)}


def add_metrics(one: Mapping[str, MetricSum], other: Mapping[str, MetricSum]) -> dict[str, MetricSum]:
    """Return the sums over the episodes of both mappings, with the names of `one` first."""
    return {name: one.get(name, MetricSum()) + other.get(name, MetricSum()) for name in {**one, **other}}


def keep_most_reported(sums: Mapping[str, MetricSum]) -> dict[str, MetricSum]:
    """Return the MAX_METRICS metrics that most episodes report, ordered by name. Among metrics with equally many episodes, the
    first by name are taken."""
    most = sorted(sums, key=lambda name: (-sums[name].count, name))[:MAX_METRICS]
    return {name: sums[name] for name in sorted(most)}


class MetricNames:
    """Names of the metrics that a run shows: for each kind, the first MAX_METRICS names reported, so that they stay the same from
    step to step."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, None]] = {}
        self._refused: set[str] = set()

    def admit(self, kind: str, sums: Mapping[str, MetricSum]) -> tuple[dict[str, MetricSum], str]:
        """Return the sums of metrics that are shown, and a warning when a metric of the kind is refused for the first time, else
        ""."""
        names = self._names.setdefault(kind, {})
        for name in sums:
            if len(names) < MAX_METRICS:
                names[name] = None
        shown = {name: one for name, one in sums.items() if name in names}
        refused = next((name for name in sums if name not in names), None)
        if refused is None or kind in self._refused:
            return shown, ""
        self._refused.add(kind)
        return shown, warn_of_many(kind, refused)


def warn_of_many(kind: str, name: str) -> str:
    """Return the warning about a kind whose agents report more metrics than are shown."""
    return (
        f"episodes of kind {kind} report more than {MAX_METRICS} different metrics: further ones (the first: {name!r}) are "
        "not shown in steps, evaluations and trackers; put values that differ from episode to episode into metadata, not into names of metrics"
    )
