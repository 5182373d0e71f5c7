"""The schedule `wsd`."""

from __future__ import annotations

from swarmq.config import Train
from swarmq.learner.methods.schedules import compute_progress


def wsd(step: int, train: Train) -> float:
    """Return 1 until `decay_steps` before the last step, then the line to `schedule_end` (warm-up, stable, decay; 2404.06395)."""
    end = train.last_scheduled_step
    return 1 - (1 - train.schedule_end) * compute_progress(step, end - (train.decay_steps or 0), end)
