"""Figures of one or several runs, as PNG or SVG: reward, evaluation, staleness, drops, times of a step, or any series by name.

One run is drawn in full: by kind, reason and part of the step, with the changes that people made while it was up. Several runs are
drawn beside each other, one line each.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec

from swarmq.errors import ConfigError, MissingExtraError
from swarmq.observe.curves import Mark, draw_marks, find_changes, reward_limits
from swarmq.observe.frames import flatten
from swarmq.observe.run import EvaluationRow, Run

PANELS = ("reward", "evaluation", "staleness", "drops", "times")
PARTS = ("wait_s", "train_s", "push_s")
"""Parts of a step that add up to about `step_s`; the pause of the engines lies within the push."""
COLOURS = ("#1f78b4", "#d95f02", "#33a02c", "#7b3294", "#b8860b", "#008b8b", "#c51b7d", "#333333")
"""Colours of runs, kinds and parts, distinguishable also in print."""
FORMATS = (".png", ".svg", ".pdf")
PANEL_INCHES = 2.6
LINE_INCHES = 0.22
DPI = 130


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a panel."""

    label: str
    steps: list[int]
    values: list[float]
    low: list[float] | None = None
    """Lower ends of the values' intervals, if there are any (`high`: the upper ends)."""
    high: list[float] | None = None
    is_thin: bool = False


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    curves: list[Curve]
    has_reward_limits: bool = False
    """Whether the axis spans 0 to 1 at least."""


class PolicyHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one policy of one run that can be drawn."""

    label: str
    steps: list[int]
    rows: list[dict[str, Any]]
    """Fields of each step's event, flattened."""
    evaluations: list[EvaluationRow]
    marks: list[Mark]
    times: list[float]
    """Unix time of each step."""


def draw_runs(runs: Sequence[Run], path: Path, *, series: Sequence[str] = (), policy: str | None = None) -> None:
    """Draw the runs into one figure. `series`: panels or names of series, by default all of `PANELS` that have data.

    Raises ConfigError for a file of another format, an unknown series, or runs without any step; MissingExtraError without matplotlib.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: unknown format; name a file that ends in {', '.join(FORMATS)}")
    histories = [history for run in runs for history in read_histories(run, policy)]
    if not any(history.rows or history.evaluations for history in histories):
        raise ConfigError(
            f"{', '.join(str(run.folder.path) for run in runs)}: no step and no evaluation so far, so there is nothing to draw"
        )
    panels = make_panels(histories, series)
    marks = place_marks(histories[0]) if len(histories) == 1 else {}
    draw_panels(panels, path, title=", ".join(dict.fromkeys(history.label for history in histories)), marks=marks)


def draw_panels(
    panels: Sequence[Panel], path: Path, *, title: str, marks: Mapping[int, Sequence[Mark]] | None = None
) -> None:
    """Draw the panels into one figure over optimizer steps. `marks`: step -> changes that took effect after it.

    Raises ConfigError if the file cannot be written, MissingExtraError without matplotlib.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("not installed: matplotlib; pip install matplotlib") from error
    marks = marks or {}
    words = [
        f"{number}: {mark.text}" for number, mark in enumerate((one for those in marks.values() for one in those), 1)
    ]
    columns = 1 if len(panels) == 1 else 2
    lines = math.ceil(len(panels) / columns)
    height = max(lines * PANEL_INCHES, 3.6) + 0.8 + LINE_INCHES * len(words)
    figure, grid = plt.subplots(
        lines, columns, figsize=(6.0 * columns + 1.0, height), layout="constrained", sharex=True, squeeze=False
    )
    axes = list(grid.flat)
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
        draw_marks(axis, marks)
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    for axis in axes[max(len(panels) - columns, 0) : len(panels)]:
        axis.set_xlabel("optimizer step")
        axis.tick_params(labelbottom=True)
    figure.suptitle(_plain(title), fontsize=11)
    if words:
        figure.supxlabel(_plain("\n".join(words)), fontsize=8, ha="left", x=0.02)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        plt.close(figure)


def read_histories(run: Run, policy: str | None = None) -> list[PolicyHistory]:
    """Return the history of each trained policy of a run, or of one."""
    events = list(run.events("step", "control"))
    evaluations = list(run.evaluations())
    marks = list(find_changes(events))
    histories = []
    for name in [policy] if policy else run.policies:
        rows = list(run.steps(name))
        label = run.folder.path.resolve().name + (f" {name}" if len(run.policies) > 1 else "")
        histories.append(
            PolicyHistory(
                label=label,
                steps=[row.step for row in rows],
                rows=[flatten(row) for row in rows],
                evaluations=evaluations,
                marks=marks,
                times=[row.at for row in rows],
            )
        )
    return histories


def make_panels(histories: Sequence[PolicyHistory], series: Sequence[str] = ()) -> list[Panel]:
    """Return the panels of the figure. Raises ConfigError for a series that no run has."""
    makers: dict[str, Callable[[Sequence[PolicyHistory]], Panel]] = {
        "reward": _reward,
        "evaluation": _evaluation,
        "staleness": _staleness,
        "drops": _drops,
        "times": _times,
    }
    panels = []
    for name in series or PANELS:
        panel = makers[name](histories) if name in makers else _series(histories, name)
        if panel.curves:
            panels.append(panel)
        elif series:
            raise ConfigError(f"--series {name}: {_suggest(histories, name)}")
    return panels


def place_marks(history: PolicyHistory) -> dict[int, list[Mark]]:
    """Return step -> changes that took effect after it."""
    placed: dict[int, list[Mark]] = defaultdict(list)
    for mark in sorted(history.marks, key=lambda one: one.at):
        placed[
            max((step for step, at in zip(history.steps, history.times, strict=True) if at <= mark.at), default=0)
        ].append(mark)
    return placed


def _reward(histories: Sequence[PolicyHistory]) -> Panel:
    curves = [_curve(history, history.label, lambda row: row.get("reward")) for history in histories]
    if len(histories) == 1:
        kinds = _names(histories[0], "reward_by_kind/")
        curves = [msgspec.structs.replace(one, label="all kinds") for one in curves]
        curves += [
            _curve(histories[0], kind, _getter(f"reward_by_kind/{kind}"), is_thin=True)
            for kind in kinds
            if len(kinds) > 1
        ]
    return Panel(title="training reward", curves=_drawable(curves), has_reward_limits=True)


def _evaluation(histories: Sequence[PolicyHistory]) -> Panel:
    """Return the panel of evaluations by kind: pass@k for the smallest k with its 95 % interval, or the reward if no success
    is reported."""
    curves = []
    for history in histories:
        for kind in dict.fromkeys(row.kind for row in history.evaluations):
            rows = sorted((row for row in history.evaluations if row.kind == kind), key=lambda row: row.version)
            passed = [(row.version, row.values.get("pass") or {}) for row in rows]
            ks = sorted({int(k) for _, values in passed for k in values})
            label = kind if len(histories) == 1 else f"{history.label} {kind}"
            found = [(version, values[str(ks[0])]) for version, values in passed if ks and str(ks[0]) in values]
            if found:
                curves.append(
                    Curve(
                        label=f"{label} pass@{ks[0]}",
                        steps=[version for version, _ in found],
                        values=[float(value["value"]) for _, value in found],
                        low=[float(value["low"]) for _, value in found],
                        high=[float(value["high"]) for _, value in found],
                    )
                )
            known = [(row.version, row.reward) for row in rows if row.reward is not None]
            if known and not found:
                curves.append(Curve(label=f"{label} reward", steps=[v for v, _ in known], values=[r for _, r in known]))
    return Panel(title="evaluation, 95 % intervals", curves=curves, has_reward_limits=True)


def _staleness(histories: Sequence[PolicyHistory]) -> Panel:
    def ages(row: dict[str, Any]) -> dict[int, float]:
        return {
            int(name.removeprefix("staleness/")): n for name, n in row.items() if name.startswith("staleness/") and n
        }

    def mean(row: dict[str, Any]) -> float | None:
        counts = ages(row)
        return sum(age * n for age, n in counts.items()) / sum(counts.values()) if counts else None

    curves = [_curve(history, "mean" if len(histories) == 1 else history.label, mean) for history in histories]
    if len(histories) == 1:
        curves.append(_curve(histories[0], "oldest episode", lambda row: max(ages(row), default=None), is_thin=True))
    return Panel(title="staleness in versions", curves=_drawable(curves))


def _drops(histories: Sequence[PolicyHistory]) -> Panel:
    """Return the panel of episodes that the learner dropped since the step before, by reason."""

    def total(row: dict[str, Any]) -> float:
        return float(sum(n for name, n in row.items() if name.startswith("dropped/")))

    if len(histories) > 1:
        return Panel(
            title="episodes dropped by the learner", curves=_drawable([_curve(h, h.label, total) for h in histories])
        )
    names = _names(histories[0], "dropped/")
    curves = [_curve(histories[0], name, _getter(f"dropped/{name}", 0.0)) for name in names]
    return Panel(title="episodes dropped by the learner", curves=_drawable(curves))


def _times(histories: Sequence[PolicyHistory]) -> Panel:
    if len(histories) > 1:
        curves = [_curve(history, history.label, _getter("step_s")) for history in histories]
    else:
        names = ("step_s", *PARTS, "pause_s")
        curves = [
            _curve(histories[0], name.removesuffix("_s"), _getter(name), is_thin=name != "step_s") for name in names
        ]
    return Panel(title="seconds of a step", curves=_drawable(curves))


def _series(histories: Sequence[PolicyHistory], name: str) -> Panel:
    return Panel(title=name, curves=_drawable([_curve(history, history.label, _getter(name)) for history in histories]))


def _getter(name: str, default: float | None = None) -> Callable[[dict[str, Any]], Any]:
    return lambda row: row.get(name, default)


def _curve(
    history: PolicyHistory, label: str, value_of: Callable[[dict[str, Any]], Any], *, is_thin: bool = False
) -> Curve:
    """Return a curve without the steps that have no number."""
    points = [(step, value_of(row)) for step, row in zip(history.steps, history.rows, strict=True)]
    known = [
        (s, float(v)) for s, v in points if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
    ]
    return Curve(label=label, steps=[s for s, _ in known], values=[v for _, v in known], is_thin=is_thin)


def _drawable(curves: Iterable[Curve]) -> list[Curve]:
    return [curve for curve in curves if curve.steps]


def _names(history: PolicyHistory, prefix: str) -> list[str]:
    """Return the names below a prefix that any step has, in alphabetical order."""
    return sorted({name.removeprefix(prefix) for row in history.rows for name in row if name.startswith(prefix)})


def _suggest(histories: Sequence[PolicyHistory], name: str) -> str:
    known = sorted(
        {
            field
            for history in histories
            for row in history.rows
            for field, value in row.items()
            if isinstance(value, int | float)
        }
    )
    if name in PANELS:
        return "no run has values of it"
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known[:8]
    return f"no run has such a series; there are {', '.join([*PANELS, *close])} and others"


def _plain(text: str) -> str:
    """Return text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def _draw_panel(axis: Any, panel: Panel) -> None:
    for curve, colour in zip(panel.curves, cycle(COLOURS), strict=False):
        width = 0.9 if curve.is_thin else 1.6
        if curve.low is not None and curve.high is not None:
            below = [value - low for value, low in zip(curve.values, curve.low, strict=True)]
            above = [high - value for value, high in zip(curve.values, curve.high, strict=True)]
            errors = [[max(one, 0.0) for one in below], [max(one, 0.0) for one in above]]
            axis.errorbar(
                curve.steps,
                curve.values,
                yerr=errors,
                fmt="o-",
                markersize=3.5,
                capsize=2.5,
                color=colour,
                label=_plain(curve.label),
                linewidth=width,
            )
        else:
            marker = "o" if len(curve.steps) == 1 else ""
            axis.plot(
                curve.steps, curve.values, color=colour, linewidth=width, marker=marker, label=_plain(curve.label)
            )
    axis.set_title(_plain(panel.title), fontsize=10, loc="left")
    if panel.has_reward_limits:
        axis.set_ylim(reward_limits(*(curve.values for curve in panel.curves)))
    else:
        axis.set_ylim(bottom=min(0.0, *(value for curve in panel.curves for value in curve.values)))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7.5, framealpha=0.7)
