"""Learning-rate schedules. One file for each built-in one, with a function of the file's name. Without torch."""

from __future__ import annotations

from typing import Protocol

from swarmq.config import Train


class ScheduleFunction(Protocol):
    """A schedule. Returns the factor (0 or more) of `learning_rate` at a step, counted from 1. Warm-up is applied by the trainer."""

    def __call__(self, step: int, train: Train, /) -> float: ...


def compute_progress(step: int, begin: int, end: int) -> float:
    """Return how much of the steps from `begin` to `end` is done: 0 at `begin`, 1 from `end` on."""
    return min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
