"""What a report is made of, before it has a format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Heading(msgspec.Struct, frozen=True):
    text: str
    level: int = 2


class Text(msgspec.Struct, frozen=True):
    text: str


class Bullets(msgspec.Struct, frozen=True):
    items: Sequence[str]


class Code(msgspec.Struct, frozen=True):
    """Lines that are shown as they are."""

    text: str


class ReportTable(msgspec.Struct, frozen=True):
    """Rows of cells; the first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A curve with its band, which is empty if one seed has no spread; positions are steps, from 1."""

    label: str
    values: list[float]
    low: list[float]
    high: list[float]


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of arms over steps."""

    x: str
    y: str
    lines: list[Line]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    mean: float
    low: float
    high: float
    points: list[float]
    """Difference of each seed."""


class Forest(msgspec.Struct, frozen=True, kw_only=True):
    """Differences to the baseline with their intervals."""

    x: str
    margin: float
    """Smallest effect of interest, shaded on both sides of 0."""
    estimates: list[Estimate]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name of the file, without suffix."""
    caption: str
    chart: Curves | Forest


Block = Heading | Text | Bullets | Code | ReportTable | Figure


def number(value: float | None) -> str:
    """Write a number with three significant digits; a dash for none or an infinite one."""
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:.3g}"
    return f"{value:,.0f}" if "e+" in text else text


def span(low: float, high: float) -> str:
    """Write an interval."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unbounded"
    return f"{number(low)} to {number(high)}"


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
