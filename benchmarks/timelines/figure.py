"""Draw how much faster than the oracle each workload was, beside how many times fewer tokens it computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"rows": "#4C72B0", "tree": "#55A868"}


def draw(workloads: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """A PNG, if matplotlib is here; a line saying so if not."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        print(f"no matplotlib, so no {path.name}")
        return
    figure = Figure(figsize=(10, 0.55 * len(workloads) + 1.6), layout="constrained")
    axes = figure.subplots()
    for i, workload in enumerate(workloads):
        for way, shift in (("rows", -0.2), ("tree", 0.2)):
            measured = workload["ways"][way]
            axes.barh(i + shift, measured["speedup"], 0.36, color=COLOURS[way], label=way if not i else None)
            label = "ratio of tokens" if not i and way == "rows" else None
            axes.plot([measured["token_ratio"]] * 2, [i + shift - 0.18, i + shift + 0.18], color="black", label=label)
        if workload["goal"]:
            axes.plot(workload["goal"], i, "D", color="#C44E52", markersize=5)
    axes.plot([], [], "D", color="#C44E52", markersize=5, label="goal")
    axes.set_yticks(range(len(workloads)), [workload["workload"] for workload in workloads])
    axes.invert_yaxis()
    axes.set_xlabel("times faster than every turn a row of its own (forward + backward)")
    axes.set_title(title)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
