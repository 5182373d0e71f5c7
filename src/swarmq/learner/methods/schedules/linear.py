"""The schedule `linear`."""

from __future__ import annotations

from swarmq.config import Train
from swarmq.learner.methods.schedules import compute_progress


def linear(step: int, train: Train) -> float:
    """Return the line from 1 after warm-up to `schedule_end` at the last step."""
    return 1 - (1 - train.schedule_end) * compute_progress(step, train.warmup_steps, train.last_scheduled_step)
