"""Plots of a run's reward as PNG files, from its event file."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, cycle
from pathlib import Path
from typing import Any

import msgspec

from swarmq.live_settings import format_value
from swarmq.messages import Event

TRAINING, HELD_OUT, CHANGED = "#333333", "#d95f02", "#b03030"
KINDS = ("#1f78b4", "#33a02c", "#7b3294", "#b8860b", "#008b8b", "#c51b7d")
"""Colours of task kinds, distinguishable also in print."""
LINE_INCHES = 0.22


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A change during the run that is marked on the curve."""

    at: float
    """Unix time of the change."""
    text: str


def read_events(path: Path, *, last_bytes: int | None = None) -> Iterator[Event]:
    """Yield the events in a run's event file, or in its last `last_bytes`; lines cut by a crash or a full disk are skipped."""
    with path.open("rb") as lines:
        if last_bytes is not None:
            lines.seek(max(0, path.stat().st_size - last_bytes))
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=Event)


def find_changes(events: Iterable[Event]) -> Iterator[Mark]:
    """Yield the changes that people made: client code that is trained for the first time, and settings."""
    known: set[str] = set()
    answered: set[str] = set()
    for event in events:
        if event.name == "step":
            fresh = event.fields.get("code_versions", {}).keys() - known
            if known and fresh:
                yield Mark(at=event.at, text=f"client code {', '.join(sorted(fresh))}")
            known |= fresh
        elif event.name == "control" and event.fields.get("state") == "accepted":
            command = event.fields.get("command_id", "")
            if command and command in answered:
                continue  # a repeated answer to a repeated command
            answered.add(command)
            changes = ", ".join(f"{c['path']} = {format_value(c['value'])}" for c in event.fields.get("changes", []))
            if text := changes or event.fields.get("pace"):
                yield Mark(at=event.at, text=str(text))


def draw_reward(
    events: Iterable[Event],
    held_out: dict[int, float],
    path: Path,
    *,
    title: str,
    marks: Iterable[Mark] = (),
) -> None:
    """Plot the training reward by step, and the held-out reward at the versions of its measurement, to `path`.

    Changes made while the run was up, and `marks`, are numbered lines with a legend below the plot.
    """
    import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    events = list(events)
    steps: dict[int, float] = {}
    by_kind: dict[str, dict[int, float]] = defaultdict(dict)
    times: list[tuple[float, int]] = []
    for event in events:
        if event.name == "step":
            version = int(event.fields["version"])
            times.append((event.at, version))
            for kind, reward in event.fields.get("reward_by_kind", {}).items():
                if reward is not None:
                    by_kind[kind][version] = float(reward)
            if (reward := event.fields["reward"]) is not None:  # numbers that are not finite are written as null
                steps[version] = float(reward)
    at_step: dict[int, list[Mark]] = defaultdict(list)
    for mark in sorted([*find_changes(events), *marks], key=lambda one: one.at):
        at_step[max((version for at, version in times if at <= mark.at), default=0)].append(mark)
    words = [f"{number}: {mark.text}" for number, mark in enumerate(chain(*at_step.values()), 1)]
    figure, axes = plt.subplots(figsize=(10, 4.5 + LINE_INCHES * len(words)), layout="constrained")
    axes.plot(list(steps), list(steps.values()), color=TRAINING, linewidth=1.6, label="training, each step")
    colours = cycle(KINDS)
    for kind, rewards in sorted(by_kind.items()) if len(by_kind) > 1 else ():
        axes.plot(list(rewards), list(rewards.values()), color=next(colours), linewidth=0.9, label=f"training, {kind}")
    if held_out:
        axes.plot(list(held_out), list(held_out.values()), "o--", color=HELD_OUT, linewidth=1.2, label="held-out")
    draw_marks(axes, at_step)
    axes.set(
        ylabel="reward", ylim=reward_limits(steps.values(), held_out.values(), *map(dict.values, by_kind.values()))
    )
    axes.set_title(title, pad=18)
    axes.set_xlabel("\n".join(["optimizer step", *words]), linespacing=1.4)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def reward_limits(*curves: Iterable[float]) -> tuple[float, float]:
    """Return the limits of a reward axis: 0 to 1, extended to the values beyond."""
    values = [value for value in chain(*curves) if math.isfinite(value)]
    low, high = min([0.0, *values]), max([1.0, *values])
    margin = 0.04 * (high - low)
    return low - margin, high + margin


def draw_marks(axes: Any, at_step: Mapping[int, Sequence[Mark]]) -> None:
    """Draw a numbered line at each step with marks; the legend below the plot explains the numbers."""
    numbers = count(1)
    for step, those in at_step.items():
        axes.axvline(step, color=CHANGED, linestyle=":", linewidth=1.2)
        axes.annotate(
            ", ".join(str(next(numbers)) for _ in those),
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=CHANGED,
        )
