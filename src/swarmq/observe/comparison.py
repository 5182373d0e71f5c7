"""A replay under other settings beside the original, as lines, a Markdown page, JSON lines and a figure."""

from __future__ import annotations

import importlib.util
import math
import operator
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from swarmq.observe.plot import Curve, Panel, draw_panels
from swarmq.runtime.files import write_atomically
from swarmq.runtime.wording import count_of

if TYPE_CHECKING:
    from swarmq.learner.replay import Comparison, ReplayedStep

DIAGNOSTICS: dict[str, str] = {
    "loss": "loss",
    "kl_k3": "KL to sampler",
    "effective_samples": "effective samples",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "weighted_reward": "ratio-weighted reward",
}
"""Field of `StepDiagnostics` -> its heading."""
WEIGHTS = {
    "distance": "weight distance",
    "original_moved": "original moved",
    "replayed_moved": "replayed moved",
    "cosine": "cosine of movements",
}
"""Field of `ReplayedStep` -> its heading."""
LOW_EFFECTIVE_SAMPLES = 0.5
"""Mean effective sample size, as a share of the tokens, below which the page warns."""


def describe_step(step: ReplayedStep) -> str:
    """Return a line about one step: each diagnostic of the original and of the replay, and the distance of their weights."""
    pairs = (f"{heading} {_pair(step, name)}" for name, heading in DIAGNOSTICS.items())
    return f"step {step.version}: {', '.join(pairs)}, weight distance {step.distance:.3g}"


def write_comparison(folder: Path, comparison: Comparison) -> list[Path]:
    """Write comparison.md, comparison.jsonl and, if matplotlib is installed, comparison.png, and return their paths."""
    page, lines, figure = (folder / f"comparison.{suffix}" for suffix in ("md", "jsonl", "png"))
    write_atomically(page, make_page(comparison).encode())
    write_atomically(lines, b"".join(msgspec.json.encode(step) + b"\n" for step in comparison.steps))
    if importlib.util.find_spec("matplotlib") is None:
        return [page, lines]
    draw_panels(make_panels(comparison), figure, title=f"{comparison.policy}: {'; '.join(comparison.changes)}")
    return [page, lines, figure]


def make_page(comparison: Comparison) -> str:
    """Return the comparison as Markdown. Cells have the original's value, then the replay's."""
    head = ["step", *DIAGNOSTICS.values(), *WEIGHTS.values()]
    rows = [
        [
            str(step.version),
            *(_pair(step, name) for name in DIAGNOSTICS),
            *(_number(getattr(step, name)) for name in WEIGHTS),
        ]
        for step in comparison.steps
    ]
    table = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
    notes = "\n".join(f"- {note}" for note in explain(comparison))
    return f"# Replay of {comparison.policy}\n\n{notes}\n\nOriginal / replayed:\n\n" + "\n".join(table) + "\n"


def explain(comparison: Comparison) -> Iterator[str]:
    """Yield sentences about what the numbers mean and do not mean."""
    steps = comparison.steps
    yield f"Changed: {'; '.join(comparison.changes) or 'nothing'}. Steps {steps[0].version} to {steps[-1].version}."
    yield (
        "The replay is off-policy: its episodes were sampled by the original weights, and would have been others under its own. It says "
        "what a step does to the weights, not which reward it would have reached."
    )
    share = statistics.fmean(step.replayed.effective_samples for step in steps)
    enough = "" if share >= LOW_EFFECTIVE_SAMPLES else ", so later steps say little"
    yield f"Importance ratios against the recorded log-probabilities leave {share:.1%} of the tokens as effective samples{enough}."
    if comparison.groups_missing:
        yield (
            f"{count_of(comparison.groups_missing, 'group with equal rewards is', 'groups with equal rewards are')} missing: the run drops them, "
            "also where the changed method would train."
        )
    if skipped := [f"{step.version} ({step.replayed.skipped})" for step in steps if step.replayed.skipped]:
        yield f"The replay left the weights as they were in steps {', '.join(skipped)}."


def make_panels(comparison: Comparison) -> list[Panel]:
    """Return a panel for each diagnostic, one for the distances of weights, and one for the cosine of their movements."""
    steps = comparison.steps
    panels = [
        Panel(title=heading, curves=[_curve(side, steps, f"{side}.{name}") for side in ("original", "replayed")])
        for name, heading in DIAGNOSTICS.items()
    ]
    curves = {name: _curve(heading, steps, name) for name, heading in WEIGHTS.items()}
    cosine = curves.pop("cosine")
    panels.append(Panel(title="distances of weights (L2)", curves=[*curves.values()]))
    return [*panels, *([Panel(title=cosine.label, curves=[cosine])] if cosine.steps else [])]


def _curve(label: str, steps: Sequence[ReplayedStep], field: str) -> Curve:
    read = operator.attrgetter(field)
    known = [
        (step.version, float(value)) for step in steps if (value := read(step)) is not None and math.isfinite(value)
    ]
    return Curve(label=label, steps=[version for version, _ in known], values=[value for _, value in known])


def _pair(step: ReplayedStep, name: str) -> str:
    return f"{_number(getattr(step.original, name))} / {_number(getattr(step.replayed, name))}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
