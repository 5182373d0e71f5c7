"""Reward against `groups.max_staleness`, from trainings that were made before: `python -m benchmarks.staleness`.

A toy model was trained on a CPU by the study docs/studies/lake/loss-staleness.toml, a larger one on a GPU by
`python -m benchmarks.learns --staleness 0 1 2 4 8`, each with every bound and the same seeds. A bound of 0 is the synchronous run: nothing is
sampled while the learner trains. Each arm is compared twice:

    equal episodes    held-out reward after the last step; every training has made the same steps of the same number of episodes
    equal seconds     mean reward of the last `LAST_STEPS` batches that were trained when the fastest training ended

A bound is a permission, so the staleness that the trained episodes really had stands beside it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.tables.common import ends
from swarmq.studies.ledger import read_ledger
from swarmq.studies.records import TrialResult
from swarmq.studies.state import StudyState
from swarmq.studies.statistics.intervals import t_interval

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "docs/studies/lake/studies/loss-staleness/ledger.jsonl"
PICTURE = ROOT / "docs/images/staleness.svg"
GPU_RESULTS = "learns_staleness_h*.json"
LAST_STEPS = 5
COLOURS = {"tis_mask": "#1f78b4", "ppo_clip": "#d95f02"}


class Trained(NamedTuple):
    """One training."""

    loss: str
    bound: int
    seed: int
    held_out: float
    staleness: float
    rewards: Sequence[float]
    """Mean reward of each batch, as it was sampled."""
    seconds: Sequence[float]
    """Seconds after which each batch was trained: since the first batch began on the CPU, and since it was trained on the GPU, where
    trainings that start together get their first episodes 15 to 62 s later."""


class Row(NamedTuple):
    """The trainings with one loss and bound; each list is by seed."""

    staleness: list[float]
    equal_episodes: list[float]
    equal_seconds: list[float]
    steps: list[int]
    """Steps made in the equal seconds."""


def read_trials(ledger: Path) -> list[Trained]:
    results = StudyState(read_ledger(ledger)).results
    return [make_trained(trial.settings, trial.seed, result) for trial, result in results]


def make_trained(settings: Mapping[str, Any], seed: int, result: TrialResult) -> Trained:
    return Trained(
        loss=settings["policies.main.train.loss.name"],
        bound=settings["groups.max_staleness"],
        seed=seed,
        held_out=result.metrics["held_out_success"],
        staleness=result.metrics["staleness"],
        rewards=result.curves["reward"],
        seconds=result.curves["seconds"],
    )


def read_runs(record: Mapping[str, Any]) -> list[Trained]:
    """Read the trainings of `benchmarks.learns`; those that did not make all steps are left out."""
    runs = record["detail"]["runs"]
    steps = max(len(run["rewards"]) for run in runs)
    return [make_run(run) for run in runs if len(run["rewards"]) == steps]


def make_run(run: Mapping[str, Any]) -> Trained:
    counts = [(int(age), count) for step in run["staleness"] for age, count in step.items()]
    return Trained(
        loss=run["loss"],
        bound=run["max_staleness"],
        seed=run["seed"],
        held_out=ends(run["held_out"])[1],
        staleness=sum(age * count for age, count in counts) / sum(count for _, count in counts),
        rewards=run["rewards"],
        seconds=[at - run["step_seconds"][0] for at in run["step_seconds"]],
    )


def compare(trials: Sequence[Trained]) -> tuple[float, dict[tuple[str, int], Row]]:
    """Return the equal seconds, and a row for each loss and bound."""
    at = min(one.seconds[-1] for one in trials)
    rows: dict[tuple[str, int], Row] = {}
    for one in sorted(trials, key=lambda one: ([*COLOURS].index(one.loss), one.bound, one.seed)):
        row = rows.setdefault((one.loss, one.bound), Row([], [], [], []))
        done = max(sum(second <= at for second in one.seconds), 1)
        row.staleness.append(one.staleness)
        row.equal_episodes.append(one.held_out)
        row.equal_seconds.append(fmean(one.rewards[max(done - LAST_STEPS, 0) : done]))
        row.steps.append(done)
    return at, rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95 % interval of a share, which lies between 0 and 1."""
    found = t_interval(values)
    return max(found.low, 0.0), min(found.high, 1.0)


Part = tuple[str, float, Mapping[tuple[str, int], Row]]
"""What was trained, the equal seconds, and the rows."""


def draw(parts: Sequence[Part], path: Path) -> None:
    """Draw both comparisons of every part with 95 % intervals; each dot is a seed."""
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "staleness", "font.size": 9}):
        canvas = Figure(figsize=(7.2, 3.2 * len(parts)), layout="constrained")
        panels = canvas.subplots(len(parts), 2, sharey=True, squeeze=False)
        for (what, at, rows), both in zip(parts, panels, strict=True):
            draw_part(both, rows, at)
            both[0].set_ylabel(what)
        out = io.BytesIO()
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    path.write_bytes(out.getvalue())


def draw_part(panels: Sequence[Any], rows: Mapping[tuple[str, int], Row], at: float) -> None:
    bounds = sorted({bound for _, bound in rows})
    titles = (
        "after equal episodes: held-out reward",
        f"after {at:.0f} s: reward of the last {LAST_STEPS} batches",
    )
    for panel, title, field in zip(panels, titles, ("equal_episodes", "equal_seconds"), strict=True):
        for number, (loss, colour) in enumerate(COLOURS.items()):
            for bound in (bound for name, bound in rows if name == loss):
                values = getattr(rows[loss, bound], field)
                low, high = interval(values)
                place = bounds.index(bound) + 0.16 * number
                panel.plot([place, place], [low, high], color=colour, linewidth=2)
                panel.plot([place], [fmean(values)], "D", color=colour, markersize=5)
                panel.plot([place + 0.07] * len(values), values, "o", color=colour, markersize=2.5, alpha=0.6)
        panel.set_title(title, fontsize=9)
        names = [f"{bound}\n({fmean(rows['tis_mask', bound].staleness):.1f})" for bound in bounds]
        panel.set_xticks(range(len(bounds)), names)
        panel.set_xlabel("max_staleness (in brackets: measured mean)")
        panel.set_ylim(0, 1.02)
    for loss in dict.fromkeys(loss for loss, _ in rows):
        panels[1].plot([], [], "D", color=COLOURS[loss], label=loss)
    panels[1].legend(fontsize=8, loc="lower left")


def summarise(
    at: float, rows: Mapping[tuple[str, int], Row], where: str = ""
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return figures and detail of a part. `where`: begins the ends of its figures' names, such as `gpu_`."""
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    for (loss, bound), row in rows.items():
        end = where + (f"{bound}" if loss == "tis_mask" else f"{loss}_{bound}")
        figures[f"reward_by_bound_{end}"] = fmean(row.equal_episodes)
        figures[f"reward_by_bound_seconds_{end}"] = fmean(row.equal_seconds)
        figures[f"staleness_{end}"] = fmean(row.staleness)
        detail[f"{loss}, {bound}"] = row._asdict() | {
            f"{name}_interval": interval(getattr(row, name)) for name in ("equal_episodes", "equal_seconds")
        }
    return figures, {"equal_seconds": at, "reward_by_bound": detail}


def main() -> None:
    options = report.parser(__doc__).parse_args()
    parts: list[Part] = [("toy model, two CPU cores", *compare(read_trials(LEDGER)))]
    figures, detail = summarise(*parts[0][1:])
    for path in sorted((options.out or report.RESULTS).glob(GPU_RESULTS)):
        record = json.loads(path.read_text())
        parts.append((f"85 M, {record['hardware'].partition(';')[0]}", *compare(read_runs(record))))
        own, own_detail = summarise(*parts[-1][1:], "gpu_")
        source = {key: record[key] for key in ("command", "commit", "date", "hardware")}
        figures, detail = figures | own, detail | {"gpu": source | own_detail}
    for what, _, rows in parts:
        lines = [
            (loss, bound, len(row.staleness), *(fmean(values) for values in row[:3]), fmean(row.steps))
            for (loss, bound), row in rows.items()
        ]
        print(what)
        print(report.table(("loss", "bound", "seeds", "staleness", "equal episodes", "equal seconds", "steps"), lines))
    print(report.save("staleness", figures, detail=detail, out=options.out))
    draw(parts, (options.out or PICTURE.parent) / PICTURE.name)


if __name__ == "__main__":
    main()
