"""Lines of the record, and the comparison of the newest with those before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import RESULTS
from benchmarks.track.figures import FIGURES, Figure

RECORD = Path(__file__).parents[1] / "track.jsonl"
NOISE = RESULTS / "track_noise.json"
COMPARED = 5
"""The newest line is compared with the median of at most so many lines before it."""
SIGMAS, TOLERANCE = 3.0, 0.01
"""A figure has fallen if it is worse by more than so many standard deviations of its noise, and by more than TOLERANCE."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the set measured."""

    commit: str
    date: str
    hardware: str
    versions: dict[str, str]
    reference_s: float
    """Seconds of processor for the reference work on this machine."""
    figures: dict[str, float]
    accepted: dict[str, str] = {}
    """Figure -> why it may be worse from this line on; it is not compared with lines before."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a figure of the newest line compares."""

    figure: Figure
    newest: float
    before: float | None
    """Median of the lines before; None if there is none."""
    change: float
    """By which the figure is better than before (negative: worse): a share of it, or a difference for rewards and counts."""
    allowed: float
    """The largest fall that may be noise, in the unit of `change`; infinite if the noise was not measured or nothing was before."""

    @property
    def has_fallen(self) -> bool:
        return self.change < -self.allowed


def read_lines(path: Path = RECORD) -> list[Line]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]


def append_line(line: Line, path: Path = RECORD) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_noise(path: Path = NOISE) -> dict[str, float]:
    """Return figure -> standard deviation of repeated runs of one commit: a share of the mean, absolute for rewards."""
    return msgspec.json.decode(path.read_bytes())["figures"] if path.exists() else {}


def convert(figure: Figure, value: float, reference_s: float) -> float:
    """Return a benchmark's figure in the unit of the record."""
    if figure.unit == "per reference":
        return value * reference_s
    return value / reference_s if figure.unit == "references" else value


def measure_noise(figure: Figure, values: Sequence[float]) -> float:
    """Return the standard deviation of repeated measurements, as `read_noise` has it."""
    deviation = statistics.stdev(values)
    return deviation if figure.unit in ("reward", "count") else deviation / statistics.fmean(values)


def compare(lines: Sequence[Line], noise: Mapping[str, float]) -> list[Verdict]:
    """Compare the newest line with the median of those before it, figure by figure. Counts must be 0, whatever was before."""
    *earlier, newest = lines
    verdicts = []
    for figure in FIGURES:
        if figure.name not in newest.figures:
            continue
        value = newest.figures[figure.name]
        known: list[float] = []
        for line in earlier:
            if figure.name in line.accepted:
                known.clear()
            if figure.name in line.figures:
                known.append(line.figures[figure.name])
        before = statistics.median(known[-COMPARED:]) if known and figure.name not in newest.accepted else None
        if figure.unit == "count":
            change, allowed = -value, 0.0
        elif before is None or figure.name not in noise:  # not judged
            change, allowed = 0.0, math.inf
        else:
            change = value - before if figure.unit == "reward" else value / before - 1
            change = change if figure.better == "higher" else -change
            allowed = max(TOLERANCE, SIGMAS * noise[figure.name])
        verdicts.append(Verdict(figure=figure, newest=value, before=before, change=change, allowed=allowed))
    return verdicts
