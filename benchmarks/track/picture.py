"""The picture of the record: every figure over the commits, relative to its first line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.track.figures import FIGURES
from benchmarks.track.record import Line, read_noise

COLUMNS = 2


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw a panel for each figure; the band is the noise about the newest line, in which a change means nothing."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "track"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    noise = read_noise()
    drawn = [figure for figure in FIGURES if figure.unit != "count"]
    rows = -(-len(drawn) // COLUMNS)
    canvas, panels = plt.subplots(rows, COLUMNS, figsize=(9, 1.9 * rows), layout="constrained", squeeze=False)
    for panel in panels.flat[len(drawn) :]:
        panel.set_axis_off()
    for figure, axes in zip(drawn, panels.flat, strict=False):
        points = [(line.commit[:8], line.figures[figure.name]) for line in lines if figure.name in line.figures]
        axes.set_title(f"{figure.name} ({figure.better} is better)", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
        if not points:
            continue
        values = [value for _, value in points]
        places = range(len(points))
        axes.plot(places, values, "o-", markersize=3, linewidth=1)
        spread = noise.get(figure.name, 0.0) * (1.0 if figure.unit == "reward" else values[-1])
        axes.axhspan(values[-1] - spread, values[-1] + spread, color="C0", alpha=0.12, linewidth=0)
        axes.set_xticks(places, [commit for commit, _ in points], rotation=45, ha="right")
        axes.set_ylim(0, 1.1 * max(values))
    canvas.savefig(path, metadata={"Date": None})
    plt.close(canvas)
