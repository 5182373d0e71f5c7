"""What a trial's process gets and returns, and the files that carry both. It imports little, because functions import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from swarmq.errors import StudyError
from swarmq.studies.study import TrialPlan


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial's function gets."""

    settings: dict[str, Any]
    """Settings of the arm, with those that all arms share."""
    seed: int
    steps: int = 0
    """Step at which to stop; 0: the study has no rungs."""
    folder: str
    """Folder of the arm and seed, kept over rungs and interruptions."""


class TrialOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial's function returns, if it returns more than a dict of metrics."""

    metrics: dict[str, float]
    """Finite numbers by name; the study's metric must be among them."""
    curves: dict[str, tuple[float, ...]] = {}
    """Metric -> its values, one for each step."""
    scores: dict[str, float] = {}
    """Held-out task -> its score. If the metric is the mean of these, arms are compared task by task."""
    calls: int = 0
    """Paid calls that the trial has made."""
    money: float = 0.0
    """Money that the trial has spent, in the currency of the budget."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt.json`: what the process of a trial runs."""

    plan: TrialPlan
    agent: str = ""
    tasks: str = ""
    attempt: Attempt
    claim_id: str = ""
    """Claim of the lease under which this start runs."""


def order_path(folder: Path) -> Path:
    return folder / "attempt.json"


def result_path(folder: Path) -> Path:
    return folder / "result.json"


def log_path(folder: Path) -> Path:
    return folder / "log"


def has_started(folder: Path, claim_id: str) -> bool:
    """Return whether a trial's newest start in this folder is the one of a lease; its process may have ended since."""
    try:
        return msgspec.json.decode(order_path(folder).read_bytes(), type=Order).claim_id == claim_id
    except (OSError, msgspec.MsgspecError):
        return False


def read_outcome(folder: Path) -> TrialOutcome:
    """Return the result of a trial that has ended. Raises StudyError without one."""
    try:
        return msgspec.json.decode(result_path(folder).read_bytes(), type=TrialOutcome)
    except (OSError, msgspec.MsgspecError) as error:
        raise StudyError(f"{result_path(folder)}: the trial has ended without a result ({error})") from error
