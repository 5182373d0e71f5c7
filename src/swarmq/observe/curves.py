"""Curves of a run as a PNG, from its event file."""

from __future__ import annotations

import contextlib
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


def read_events(path: Path, *, last_bytes: int | None = None) -> Iterator[Event]:
    """The events in a run's event file, or at its end; lines that a crash or a full disk has cut are left out."""
    with path.open("rb") as lines:
        if last_bytes is not None:
            lines.seek(max(0, path.stat().st_size - last_bytes))
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=Event)


def changes_in(events: Iterable[Event]) -> Iterator[Mark]:
    """What people changed: other client code that is trained for the first time, and settings."""
    known: set[str] = set()
    for event in events:
        if event.name == "step":
            fresh = event.fields.get("code_versions", {}).keys() - known
            if known and fresh:
                yield Mark(at=event.at, text=f"client code {', '.join(sorted(fresh))}")
            known |= fresh
        elif event.name == "control" and event.fields.get("state") == "accepted":
            changes = ", ".join(f"{c['path']} = {c['value']}" for c in event.fields.get("changes", []))
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
    """Training reward by step and held-out reward at the versions it was measured, written to `path`.

    What people changed while the run was up is marked, and `marks` besides.
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
            if (reward := event.fields["reward"]) is not None:  # as figures that are not finite are written
                steps[version] = float(reward)
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(list(steps), list(steps.values()), color="#9bb8d3", linewidth=1, label="training reward, each step")
    for kind, rewards in sorted(by_kind.items()) if len(by_kind) > 1 else ():
        axes.plot(list(rewards), list(rewards.values()), linewidth=0.7, alpha=0.6, label=f"training, {kind}")
    if held_out:
        axes.plot(list(held_out), list(held_out.values()), "o-", color="#1f4e79", linewidth=2, label="held-out reward")
    for mark in [*changes_in(events), *marks]:
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
    axes.set(xlabel="optimizer step", ylabel="reward", title=title, ylim=(-0.02, max([1.05, *steps.values()])))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
