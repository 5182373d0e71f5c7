"""Curves of a run as a PNG, from its event file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from swarmq.messages import Event


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a run and should be seen on its curve."""

    at: float
    """Unix time."""
    text: str


def read_events(path: Path) -> Iterator[Event]:
    """The events in a run's event file; a last line cut by a crash is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line, type=Event)


def draw_reward(
    events: Iterable[Event],
    held_out: dict[int, float],
    path: Path,
    *,
    title: str,
    marks: Iterable[Mark] = (),
) -> None:
    """Training reward by step and held-out reward at the versions it was measured, written to `path`."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    steps: dict[int, float] = {}
    by_kind: dict[str, dict[int, float]] = defaultdict(dict)
    times: list[tuple[float, int]] = []
    for event in events:
        if event.name == "step":
            version = int(event.fields["version"])
            steps[version] = float(event.fields["reward"])
            times.append((event.at, version))
            for kind, reward in event.fields.get("reward_by_kind", {}).items():
                by_kind[kind][version] = float(reward)
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(list(steps), list(steps.values()), color="#9bb8d3", linewidth=1, label="training reward, each step")
    for kind, rewards in sorted(by_kind.items()) if len(by_kind) > 1 else ():
        axes.plot(list(rewards), list(rewards.values()), linewidth=0.7, alpha=0.6, label=f"training, {kind}")
    axes.plot(list(held_out), list(held_out.values()), "o-", color="#1f4e79", linewidth=2, label="held-out reward")
    for mark in marks:
        at_step = max((version for at, version in times if at <= mark.at), default=0)
        axes.axvline(at_step, color="#b03030", linestyle="--", linewidth=1)
        axes.annotate(
            mark.text,
            (at_step, 0.02),
            rotation=90,
            fontsize=8,
            color="#b03030",
            xytext=(3, 0),
            textcoords="offset points",
        )
    axes.set(xlabel="optimizer step", ylabel="reward", title=title, ylim=(-0.02, 1.05))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
