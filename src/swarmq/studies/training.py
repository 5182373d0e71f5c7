"""A trial that is a training: one `swarmq train` in the trial's folder, and what its run folder says afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import StudyError, SwarmqError
from swarmq.observe.run import Run, StepRow
from swarmq.runtime.processes import die_with_parent
from swarmq.studies.identity import to_sets
from swarmq.studies.trial import Order, TrialOutcome
from swarmq.whole_run.report import END_STEPS, TrainingRecord

RUN = "trial"
"""Name of the run that a training trial has in its folder."""
CURVES = ("reward", "loss")
SUMS = {"trained_episodes": "episodes", "trained_calls": "turns", "trained_tokens": "tokens_trained"}
"""Metric -> field of a step that is summed over all steps."""


def train(order: Order) -> TrialOutcome:
    """Run `swarmq train`, or continue it, and return its result. Raises StudyError if it fails."""
    plan, attempt = order.plan, order.attempt
    sets, last = choose_settings(order)
    command = [sys.executable, "-m", "swarmq", "train", plan.job, "--plain", "--agent", order.agent]
    for option, value in (("--tasks", order.tasks), ("--held-out", plan.held_out)):
        command += [option, value] if value else []
    command += [part for one in sets for part in ("--set", one)]
    process = subprocess.Popen(command, preexec_fn=_die_at_once)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # so that it stops in order
    if status := process.wait():
        raise StudyError(f"`swarmq train` has ended with status {status}; its output is above")
    folder = RunFolder(Path(attempt.folder) / RUN)
    for policy, step in last.items():
        if (done := folder.newest_checkpoint(policy)) < step:  # it was asked to stop
            raise StudyError(f"`swarmq train` has stopped at step {done} of {step} of {policy}")
    return read_training(folder, max(last.values()))


def choose_settings(order: Order) -> tuple[list[str], dict[str, int]]:
    """Return the `--set` arguments of a trial's training, and its last step for each trained policy."""
    attempt = order.attempt
    # a RabbitMQ of its own: on the job's, all trials would have the queues of one run
    sets = [*to_sets(attempt.settings), f"run={RUN}", f"folder={attempt.folder}", 'broker.url=""']
    last = {}
    for policy, settings in SwarmJob.load(order.plan.job, sets=sets).policies.items():
        if settings.trained:
            last[policy] = attempt.steps or settings.train.max_steps
            sets += [
                f"policies.{policy}.train.seed={attempt.seed}",
                f"policies.{policy}.train.max_steps={last[policy]}",
            ]
            if end := settings.train.last_scheduled_step:  # else it would end at the rung
                sets.append(f"policies.{policy}.train.schedule_steps={end}")
    return sets, last


def _die_at_once() -> None:
    die_with_parent(signal.SIGKILL)


def read_training(folder: RunFolder, last: int) -> TrialOutcome:
    """Return the result of a run of `swarmq train` that has made its step `last`; without held-out metrics if that step was
    not measured. Raises StudyError if held-out attempts have failed there: a mean over the others would compare arms on different
    tasks. The next start of the trial measures that step again."""
    record, run = TrainingRecord.load(folder.training), Run(folder.path, cache=folder.path)
    measured = record.held_out.get(last, {}).values()
    if failed := sum(one.failed for one in measured):
        record.held_out.pop(last)
        record.save(folder.training)
        why = Counter[str]()
        for one in measured:
            why.update(one.failures)
        raise StudyError(
            f"{failed} of {failed + sum(one.n for one in measured)} held-out attempts have ended without a reward "
            f"({'; '.join(f'{times} x {line}' for line, times in why.most_common(3))}), and the mean of the others is no result; "
            "an agent should return a reward for what it fails to do"
        )
    steps = [*run.steps()]
    curves = _draw_curves(steps)
    metrics = {"seconds": record.seconds, "steps": float(len(steps))}
    metrics |= {name: float(sum(step.values.get(field, 0) for step in steps)) for name, field in SUMS.items()}
    metrics["dropped_episodes"] = float(sum(sum(step.values.get("dropped", {}).values()) for step in steps))
    if (staleness := _mean(pair for step in steps for pair in _count_staleness(step))) is not None:
        metrics["staleness"] = staleness
    if rewards := curves.get("reward"):
        metrics["reward"] = fmean(rewards[-END_STEPS:])
    for suffix, version in (("_before", 0), ("", last)):
        reports = record.held_out.get(version, {}).values()
        if any(one.failed for one in reports):
            continue
        for name, mean in (
            ("held_out", _mean((one.mean_reward, one.tasks) for one in reports)),
            ("held_out_success", _mean((one.success_rate, one.tasks) for one in reports)),
        ):
            if mean is not None:
                metrics[name + suffix] = mean
    return TrialOutcome(metrics=metrics, curves=curves)


def read_curves(trial: Path) -> dict[str, tuple[float, ...]]:
    """Return the curves so far of the training in a trial's folder; none if it has not begun, or is not on this host."""
    try:
        return _draw_curves([*Run(trial / RUN, cache=trial / RUN).steps()])
    except (SwarmqError, OSError):
        return {}


def _draw_curves(steps: Sequence[StepRow]) -> dict[str, tuple[float, ...]]:
    """Return metric -> its values at these steps."""
    curves = {name: tuple(float(step.values[name]) for step in steps if name in step.values) for name in CURVES}
    curves["staleness"] = tuple(_mean(_count_staleness(step)) or 0.0 for step in steps)
    curves["seconds"] = tuple(step.at - steps[0].at + steps[0].values.get("step_s", 0.0) for step in steps)
    return {name: values for name, values in curves.items() if values}


def _count_staleness(step: StepRow) -> list[tuple[float, int]]:
    """Return the weight versions between sampling and training of the step's episodes, by their oldest token, each with its number of
    episodes."""
    return [(float(versions), episodes) for versions, episodes in step.values.get("staleness", {}).items()]


def _mean(measured: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the mean of values with their weights, such as rewards of kinds with their numbers of tasks."""
    known = [(value, weight) for value, weight in measured if value is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None
