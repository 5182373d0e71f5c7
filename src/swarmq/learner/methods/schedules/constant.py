"""The schedule `constant`."""

from __future__ import annotations

from swarmq.config import Train


def constant(_step: int, _train: Train) -> float:
    return 1.0
