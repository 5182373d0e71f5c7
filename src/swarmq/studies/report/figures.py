"""Drawing of a report's charts by matplotlib, to bytes that are the same every time."""

from __future__ import annotations

import io
from typing import Any, Literal

from swarmq.studies.report.blocks import Curves, Figure, Forest

COLOURS = ("#1f78b4", "#d95f02", "#33a02c", "#7b3294", "#b8860b", "#008b8b", "#c51b7d", "#333333")
STYLES = ("-", "--", "-.", ":")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "swarmq",
    "path.simplify": False,
}
DPI = 220
WIDTH_INCHES = 6.6


def draw(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """Draw a chart. SVG and PNG carry neither date nor version."""
    import matplotlib as mpl  # noqa: PLC0415 - slow, and Markdown without figures does without
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "svg.hashsalt": figure.name}):
        rows = len(figure.chart.estimates) if isinstance(figure.chart, Forest) else 0
        canvas = Canvas(figsize=(WIDTH_INCHES, 0.9 + 0.42 * rows if rows else 3.1), layout="constrained")
        axes = canvas.subplots()
        if isinstance(figure.chart, Forest):
            _draw_forest(axes, figure.chart)
        else:
            _draw_curves(axes, figure.chart)
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        canvas.savefig(out, format=kind, dpi=DPI, metadata=metadata)
    return out.getvalue()


def _draw_forest(axes: Any, chart: Forest) -> None:
    axes.axvspan(-chart.margin, chart.margin, color="#000000", alpha=0.07, linewidth=0)
    axes.axvline(0, color="#555555", linewidth=0.8)
    for place, one in enumerate(chart.estimates):
        colour = COLOURS[(place + 1) % len(COLOURS)]
        axes.plot(
            one.points, [place + 0.2] * len(one.points), "o", color=colour, markersize=3, alpha=0.5, markeredgewidth=0
        )
        axes.plot([one.low, one.high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot([one.mean], [place], "D", color=colour, markersize=5.5)
    axes.set_yticks(range(len(chart.estimates)), [one.label for one in chart.estimates])
    axes.set_ylim(len(chart.estimates) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(chart.x)


def _draw_curves(axes: Any, chart: Curves) -> None:
    for place, line in enumerate(chart.lines):
        colour, steps = COLOURS[place % len(COLOURS)], range(1, len(line.values) + 1)
        style = STYLES[place // len(COLOURS) % len(STYLES)]
        if line.low:
            axes.fill_between(steps, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        marker = "o" if len(line.values) == 1 else None
        axes.plot(steps, line.values, color=colour, linestyle=style, linewidth=1.6, label=line.label, marker=marker)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#000000", alpha=0.08, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
