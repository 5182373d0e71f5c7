"""Logging of every step's metrics to experiment trackers, by accelerate.

TensorBoard needs no configuration and writes into the run folder; other trackers are chosen by name and configured by their own
environment variables. A tracker that fails during the run causes a warning and never ends the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
from accelerate import Accelerator
from accelerate.tracking import filter_trackers

from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.train.tracker_packages import check_trackers

log = structlog.get_logger()

UNSAFE = re.compile(r"[^A-Za-z0-9_.-]|\.+$")
"""Characters that are replaced in parts of a metric's name, because some trackers refuse or cut them; names of kinds may
contain them."""
LONGEST = 80
"""Longest part of a metric's name. MLflow allows 250 characters for the whole name; beyond, it refuses all metrics of the step."""
ENDS_WITH_AN_ERROR = "tensorboard"
"""Tracker whose writing thread ends at its first error, such as a full disk, so that every later step fails."""
SELDOM = 64
"""A failing tracker is restarted after 1, 2, 4, 8 ... failed steps and after every multiple of SELDOM; each restart leaves an
empty file."""


def tracker_folders(folder: Path) -> dict[str, str]:
    """Return environment variables that place the trackers' folders, whose defaults are partly the current directory. Values
    set by the user win."""
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

    def log(self, version: int, fields: Mapping[str, Any]) -> None:
        """Log the numbers in `fields`; numbers in nested dictionaries as `name/key`."""
        if not self._on:
            return
        values = dict(flatten(fields))
        for tracker in self._accelerator.trackers:
            try:
                self._begin_again(tracker)
                tracker.log(values, step=version)
            except Exception as error:
                self._failed[tracker.name] += 1
                if self._failed[tracker.name] == 1:
                    _warn(tracker, error, version=version, action="figures are in events until it is back")
            else:
                if failed := self._failed.pop(tracker.name, 0):
                    log.info("tracker_back", tracker=tracker.name, version=version, steps_missed=failed)

    def _begin_again(self, tracker: Any) -> None:
        """Restart a failed tracker with another file in the same folder, which TensorBoard shows as one run."""
        failed = self._failed[tracker.name]
        if tracker.name == ENDS_WITH_AN_ERROR and failed and (failed & (failed - 1) == 0 or failed % SELDOM == 0):
            with contextlib.suppress(Exception):  # it may fail for the same reason
                tracker.finish()
            tracker.start()

    def close(self) -> None:
        if not self._on:
            return
        for tracker in self._accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:
                _warn(tracker, error, action="its newest figures may be missing there; they are in events")


def _warn(tracker: Any, error: Exception, **what: Any) -> None:
    log.warning("tracker_failed", tracker=tracker.name, error=str(error), **what)


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
    name = UNSAFE.sub("_", raw)[:LONGEST] or "_"
    return raw if name == raw else f"{name}-{hashlib.sha256(raw.encode(errors='backslashreplace')).hexdigest()[:6]}"
