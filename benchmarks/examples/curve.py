"""The picture of a tutorial's README: training reward by step, held-out reward before and after, every seed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.examples.course import Row
from swarmq.observe.curves import reward_limits


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    held_out: list[float] = []
    for number, row in enumerate(rows):
        colour = f"C{number}"
        axes.plot(list(row.rewards), list(row.rewards.values()), color=colour, linewidth=0.9, alpha=0.6)
        points = [(0, row.before), (row.steps, row.after)]
        measured = [(step, point) for step, point in points if point is not None]
        held_out += [point.reward for _, point in measured]
        axes.errorbar(
            [step for step, _ in measured],
            [point.reward for _, point in measured],
            yerr=[1.96 * point.standard_error for _, point in measured],
            fmt="o--",
            color=colour,
            capsize=3,
            label=f"seed {row.seed}, held-out",
        )
    for policy, mean in _mean_by_policy(rows).items():
        axes.axhline(mean, color="0.4", linewidth=0.9, linestyle=":", label=f"{policy}, held-out")
        held_out.append(mean)
    axes.set(title=title, xlabel="optimizer step", ylabel="reward")
    axes.set_ylim(reward_limits(*(row.rewards.values() for row in rows), held_out))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _mean_by_policy(rows: Sequence[Row]) -> dict[str, float]:
    """Return policy that is not trained -> its mean held-out reward."""
    measured: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for policy, point in row.frozen.items():
            measured[policy].append(point.reward)
    return {policy: statistics.fmean(rewards) for policy, rewards in measured.items()}
