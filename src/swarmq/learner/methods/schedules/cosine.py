"""The schedule `cosine`."""

from __future__ import annotations

import math

from swarmq.config import Train
from swarmq.learner.methods.schedules import compute_progress


def cosine(step: int, train: Train) -> float:
    """Return half a cosine from 1 after warm-up to `schedule_end` at the last step (1608.03983, without restarts)."""
    done = compute_progress(step, train.warmup_steps, train.last_scheduled_step)
    return train.schedule_end + (1 - train.schedule_end) * (1 + math.cos(math.pi * done)) / 2
