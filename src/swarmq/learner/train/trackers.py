"""Logging of steps, evaluations and sample conversations to experiment trackers, by accelerate.

TensorBoard needs no configuration and writes into the run folder; other trackers are chosen by name and configured by their own
environment variables. A tracker that fails during the run causes a warning and never ends the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
from accelerate import Accelerator
from accelerate.tracking import filter_trackers

from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.train import samples
from swarmq.learner.train.tracker_packages import check_trackers
from swarmq.messages import Rollout

log = structlog.get_logger()

UNSAFE = re.compile(r"[^A-Za-z0-9_.-]|\.+$")
"""Characters that are replaced in parts of a metric's name, because some trackers refuse or cut them; names of kinds may
contain them."""
MAX_PART_CHARS = 80
"""Maximum number of characters in a part of a metric's name. MLflow allows 250 characters for the whole name; if one name is
longer, it refuses all metrics of the step."""
ENDS_WITH_AN_ERROR = "tensorboard"
"""Tracker whose writing thread ends at its first error, such as a full disk, so that every later step fails."""
SORTED_BY_STEP = "wandb"
"""Tracker that refuses values of a step earlier than its newest one. It therefore gets evaluations at its present step, and draws
them over `eval/version`."""
SAMPLES_EVERY = 10
"""Steps between two tables of sample conversations; the first step has one, too."""
RESTART_EVERY = 64
"""A failing tracker is restarted after 1, 2, 4, 8, ... failed steps and after each multiple of RESTART_EVERY, and not more often,
because each restart leaves an empty file."""


def tracker_folders(folder: Path) -> dict[str, str]:
    """Return environment variables that place the trackers' folders below `folder`, because some trackers write to the current
    directory by default. Values set by the user win."""
    return {
        "WANDB_DIR": str(folder),
        "SWANLAB_LOG_DIR": str(folder / "swanlog"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder.absolute() / 'mlflow.db'}",
    }


class Trackers:
    """The trackers of one policy. Only rank 0 logs."""

    def __init__(self, accelerator: Accelerator, train: Train, *, run: str, policy: str, folder: Path) -> None:
        """Start the trackers. Raises LearnerError if a tracker's package is missing, or if it cannot start or write to its
        folder."""
        self._accelerator = accelerator
        self._failed: Counter[str] = Counter()
        """Tracker -> number of failed steps in a row."""
        self._samples = train.tracker_samples
        check_trackers(train.trackers)
        self._on = bool(train.trackers) and accelerator.is_main_process
        if not self._on:
            return
        with map_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        accelerator.project_configuration.set_directories(str(folder))
        for name, place in tracker_folders(folder).items():
            os.environ.setdefault(name, place)
        accelerator.log_with = filter_trackers(list(train.trackers), str(folder))
        try:
            accelerator.init_trackers(f"{run}.{policy}", config=dict(flatten(msgspec.to_builtins(train), texts=True)))
        except Exception as error:
            raise LearnerError(f"train.trackers: {', '.join(train.trackers)} cannot be started: {error}") from error
        for tracker in accelerator.trackers:
            if tracker.name == SORTED_BY_STEP:
                tracker.tracker.define_metric("eval/*", step_metric="eval/version")

    def log(self, version: int, fields: Mapping[str, Any]) -> None:
        """Log the numbers in `fields`; numbers in nested dictionaries as `name/key`."""
        values = dict(flatten(fields))
        self._each(version, lambda tracker: tracker.log(values, step=version))

    def log_evaluation(self, version: int, results: Mapping[str, Any], *, now: int) -> None:
        """Log the results of an evaluation of weights `version`, while the learner has weights `now`."""
        values = dict(flatten({"eval": evaluation_figures(version, results)}))
        self._each(
            version, lambda tracker: tracker.log(values, step=now if tracker.name == SORTED_BY_STEP else version)
        )

    def log_samples(self, version: int, episodes: Sequence[Rollout]) -> None:
        """Log a table of trained conversations every SAMPLES_EVERY steps, to trackers that have tables."""
        if not self._samples or (version != 1 and version % SAMPLES_EVERY):
            return
        rows: list[list[Any]] = []

        def log_table(tracker: Any) -> None:
            if hasattr(tracker, "log_table"):
                rows[:] = rows or samples.make_rows(version, episodes, self._samples)
                tracker.log_table("samples", columns=samples.COLUMNS, data=rows, step=version)

        self._each(version, log_table)

    def _each(self, version: int, act: Callable[[Any], None]) -> None:
        """Call `act` on every tracker. A tracker that fails causes one warning until it works again."""
        for tracker in self._accelerator.trackers if self._on else ():
            try:
                self._begin_again(tracker)
                act(tracker)
            except Exception as error:
                self._failed[tracker.name] += 1
                if self._failed[tracker.name] == 1:
                    _warn(tracker, error, version=version, action="metrics are only in the events until it works again")
            else:
                if failed := self._failed.pop(tracker.name, 0):
                    log.info("tracker_back", tracker=tracker.name, version=version, steps_missed=failed)

    def _begin_again(self, tracker: Any) -> None:
        """Restart a failed tracker with another file in the same folder, which TensorBoard shows as one run."""
        failed = self._failed[tracker.name]
        if (
            tracker.name == ENDS_WITH_AN_ERROR
            and failed
            and (failed & (failed - 1) == 0 or failed % RESTART_EVERY == 0)
        ):
            with contextlib.suppress(Exception):  # finish() may fail for the same reason
                tracker.finish()
            tracker.start()

    def close(self) -> None:
        if not self._on:
            return
        for tracker in self._accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:
                _warn(tracker, error, action="its newest metrics may be missing; they are in the events")


def evaluation_figures(version: int, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an evaluation round: over all kinds, and for each kind under `by_kind`. `results`: fields of the
    `evaluated` event."""
    kinds: Mapping[str, Any] = results.get("kinds", {})
    rewards = [(one["reward"], one["episodes"]) for one in kinds.values() if one.get("reward") is not None]
    passed: dict[str, list[tuple[float, int]]] = {}
    by_kind: dict[str, dict[str, Any]] = {}
    for kind, one in kinds.items():
        mine = by_kind[kind] = {
            "tasks": one.get("tasks"),
            "reward": one.get("reward"),
            "metrics": one.get("metrics", {}),
        }
        for k, share in one.get("pass", {}).items():
            name = f"pass_at_{k}"
            mine |= {name: share["value"], f"{name}_low": share["low"], f"{name}_high": share["high"]}
            passed.setdefault(name, []).append((share["value"], share["tasks"]))
    return {
        "version": version,
        **{name: results.get(name) for name in ("seconds", "missing", "given_up")},
        **({"reward": _weighted_mean(rewards)} if rewards else {}),
        **{name: _weighted_mean(shares) for name, shares in passed.items()},
        "by_kind": by_kind,
    }


def _weighted_mean(values: Sequence[tuple[float, int]]) -> float:
    """Return the weighted mean of (value, weight) pairs."""
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _warn(tracker: Any, error: Exception, **what: Any) -> None:
    log.warning("tracker_failed", tracker=tracker.name, reason=str(error), **what)


def flatten(fields: Mapping[str, Any], *, prefix: str = "", texts: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield numbers under names joined by `/`; with `texts`, every value as a string."""
    for raw, value in fields.items():
        name = _safe(raw)
        if isinstance(value, Mapping):
            yield from flatten(value, prefix=f"{prefix}{name}/", texts=texts)
        elif isinstance(value, int | float):
            yield prefix + name, float(value) if not texts else value
        elif texts:
            yield prefix + name, str(value)


def _safe(raw: str) -> str:
    """Return a name that every tracker accepts, different for different names."""
    name = UNSAFE.sub("_", raw)[:MAX_PART_CHARS] or "_"
    return raw if name == raw else f"{name}-{hashlib.sha256(raw.encode(errors='backslashreplace')).hexdigest()[:6]}"
