"""The page with which `swarmq train` ends: rewards before and after, steps, time, dropped episodes, checkpoint."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from swarmq.client.runners.report import EvalReport
from swarmq.config import RunFolder
from swarmq.errors import ConfigError
from swarmq.observe.board import condense, sparkline
from swarmq.observe.run import Run, StepRow
from swarmq.runtime.files import write_atomically

END_STEPS = 5
"""Maximum number of steps over which the first and the last training reward are averaged, because one batch says little."""
CURVE_CHARACTERS = 60
PARTS = {"wait_s": "waiting for episodes", "train_s": "training", "push_s": "pushing weights"}
Row = tuple[str, str]


class TrainingRecord(msgspec.Struct, kw_only=True):
    """Facts about a training that the run's events lack, collected over all calls of `swarmq train`."""

    seconds: float = 0.0
    """Time that all calls took together."""
    held_out: dict[int, dict[str, EvalReport]] = {}
    """Weight version -> kind -> result on tasks that are never trained."""

    @classmethod
    def load(cls, path: Path) -> TrainingRecord:
        """Return the record, or a new one. Raises ConfigError if the file is damaged."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}): restore it, or remove it to measure again") from error

    def save(self, path: Path) -> None:
        write_atomically(path, msgspec.json.encode(self))


def write_report(folder: RunFolder, record: TrainingRecord, *, cache: Path | None = None) -> str:
    """Write the page into the run folder and return its text. `cache`: folder of the run's index, by default the user's
    cache."""
    text = make_report(Run(folder.path, cache=cache), record)
    write_atomically(folder.report, text.encode())
    return text


def make_report(run: Run, record: TrainingRecord) -> str:
    """Return the page as Markdown."""
    ledger = run.ledger()
    lost = sum(ledger.dropped.values()) + sum(ledger.failed.values())
    left = ledger.open + ledger.waiting + ledger.published
    rows = [row for policy in run.policies for row in _policy_rows(run, policy)]
    rows += _held_out_rows(record.held_out)
    rows += [
        ("time", ", ".join([_duration(record.seconds), *_parts(run)])),
        (
            "episodes",
            f"{ledger.begun:,} begun, {ledger.trained:,} trained, {lost:,} dropped or failed, {left:,} left over",
        ),
    ]
    drops = [
        (one.reason, one.kind, f"{one.episodes:,}", _number(one.mean_reward), one.newest, one.explanation)
        for one in run.drops()
    ]
    return "\n".join(
        [
            f"# Run {run.job.run}",
            "",
            *_table(("measure", "result"), rows),
            "",
            "## Not trained",
            "",
            *(
                _table(("reason", "kind", "episodes", "mean reward", "newest episode", "meaning"), drops)
                if drops
                else ["No episode was dropped or failed."]
            ),
            "",
            f"`swarmq inspect {run.folder.path} EPISODE` shows an episode, `swarmq dashboard {run.folder.path}` the whole run.",
            "",
        ]
    )


def _policy_rows(run: Run, policy: str) -> Iterator[Row]:
    of = f" of {policy}" if len(run.policies) > 1 else ""
    steps = [*run.steps(policy)]
    last, most = (steps[-1].step if steps else 0), run.live_job().policies[policy].train.max_steps
    yield f"steps{of}", f"{last:,} of {most:,}" if most else f"{last:,}"
    if rewards := _rewards(steps):
        ends = max(min(END_STEPS, len(rewards) // 2), 1)
        first, final = statistics.fmean(rewards[:ends]), statistics.fmean(rewards[-ends:])
        over = f"first and last {ends} steps" if ends > 1 else "first and last step"
        yield f"training reward{of}, {over}", f"{_number(first)} → {_number(final)}"
        yield f"training reward{of}, all steps", sparkline(condense(rewards, CURVE_CHARACTERS))
    version = run.folder.newest_checkpoint(policy)
    place = run.folder.checkpoints(policy) / f"step-{version:08d}"
    yield f"checkpoint{of}", f"`{place}`" if version else "none yet"


def _held_out_rows(held_out: Mapping[int, Mapping[str, EvalReport]]) -> Iterator[Row]:
    if not held_out:
        yield "held-out reward", "not measured; `--held-out DATA` names tasks for it"
    for version, reports in sorted(held_out.items()):
        for kind, report in reports.items():
            yield f"held-out reward{f' of {kind}' if len(reports) > 1 else ''}, version {version}", str(report)


def _rewards(steps: Sequence[StepRow]) -> list[float]:
    return [float(step.values["reward"]) for step in steps if step.values.get("reward") is not None]


def _parts(run: Run) -> Iterator[str]:
    sums = {name: sum(float(step.values.get(name) or 0.0) for step in run.steps()) for name in PARTS}
    return (f"{PARTS[name]} {_duration(seconds)}" for name, seconds in sums.items() if seconds >= 1)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
