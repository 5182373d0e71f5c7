"""Numbers in the words of a planner that no ledger holds: a model that makes up a figure is caught here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from swarmq.studies.analysis import Results
from swarmq.studies.statistics import ArmComparison

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?: ?%)?(?![\w])", re.IGNORECASE)
MAX_PLAIN = 1_000
"""Whole numbers up to this one are counts of seeds, steps or tasks, and need no source."""


def find_unknown_numbers(text: str, results: Results, comparisons: Sequence[ArmComparison]) -> list[str]:
    """Return the numbers of a text that are no metric, setting or comparison of the ledger, at the precision of the text.

    Values of curves and of single tasks do not count: there are so many that most numbers are near one.
    """
    known = [*_known(results, comparisons)]
    return [shown for shown in dict.fromkeys(NUMBER.findall(text)) if not _is_known(shown, known)]


def mark_unknown_numbers(text: str, results: Results, comparisons: Sequence[ArmComparison]) -> str:
    unknown = {*find_unknown_numbers(text, results, comparisons)}
    return NUMBER.sub(lambda m: f"{m[0]} [not in the ledger]" if m[0] in unknown else m[0], text)


def _is_known(shown: str, known: list[float]) -> bool:
    percent = shown.endswith("%")
    digits = shown.rstrip("% ").lower()
    value = float(digits)
    if not math.isfinite(value):
        return False
    if not percent and "." not in digits and "e" not in digits and abs(value) <= MAX_PLAIN:
        return True
    decimals = len(digits.partition(".")[2].partition("e")[0])
    scale = 10.0 ** int(digits.partition("e")[2] or 0)
    tolerance = 0.5001 * 10.0**-decimals * scale
    return any(abs(abs(other) * (100 if percent else 1) - abs(value)) <= tolerance for other in known)


def _known(results: Results, comparisons: Sequence[ArmComparison]) -> Iterator[float]:
    for trial, result in results:
        yield from result.metrics.values()
        yield from (float(v) for v in trial.settings.values() if isinstance(v, int | float))
    for found in comparisons:
        yield from found.differences
        for value in (found.mean, found.p, found.p_holm, found.interval.low, found.interval.high):
            if value is not None and math.isfinite(value):
                yield value
    yield from _means(results)


def _means(results: Results) -> Iterator[float]:
    """Yield the mean of each metric of each arm."""
    sums: dict[tuple[str, int, str], list[float]] = {}
    for trial, result in results:
        for metric, value in result.metrics.items():
            sums.setdefault((trial.arm, trial.rung, metric), []).append(value)
    yield from (math.fsum(values) / len(values) for values in sums.values())
