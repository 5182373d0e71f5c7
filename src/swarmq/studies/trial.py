"""The process of one trial: `python -m swarmq.studies.trial FOLDER` runs what FOLDER/attempt.json says, and writes FOLDER/result.json.

A trial that was interrupted is started again in the same folder: `swarmq train` continues there, and a function may.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from swarmq.client.data.targets import load_object
from swarmq.errors import StudyError
from swarmq.runtime.files import write_atomically
from swarmq.studies.study import TrialPlan


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial's function gets."""

    settings: dict[str, Any]
    seed: int
    steps: int = 0
    """Step at which to stop; 0: the study has no rungs."""
    folder: str
    """Folder of the arm and seed, kept over rungs and interruptions."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial's function returns, if it returns more than a dict of metrics."""

    metrics: dict[str, float]
    curves: dict[str, tuple[float, ...]] = {}
    scores: dict[str, float] = {}
    calls: int = 0
    money: float = 0.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt.json`: what the process of a trial runs."""

    plan: TrialPlan
    agent: str = ""
    tasks: str = ""
    attempt: Attempt


def order_path(folder: Path) -> Path:
    return folder / "attempt.json"


def result_path(folder: Path) -> Path:
    return folder / "result.json"


def log_path(folder: Path) -> Path:
    return folder / "log"


def read_outcome(folder: Path) -> Outcome:
    """Return the result of a trial that has ended. Raises StudyError without one."""
    try:
        return msgspec.json.decode(result_path(folder).read_bytes(), type=Outcome)
    except (OSError, msgspec.MsgspecError) as error:
        raise StudyError(f"{result_path(folder)}: the trial has ended without a result ({error})") from error


def run(folder: Path) -> Outcome:
    """Run the trial of a folder. The working directory is the folder of the study file."""
    order = msgspec.json.decode(order_path(folder).read_bytes(), type=Order)
    if order.plan.function:
        return call(order)
    from swarmq.studies.training import train  # noqa: PLC0415 - functions need none of its imports

    return train(order)


def call(order: Order) -> Outcome:
    """Call the trial's function. Raises StudyError for an answer that is no result."""
    target = order.plan.function
    returned = load_object(target)(order.attempt)
    try:
        return msgspec.convert(
            returned if isinstance(returned, Outcome) else {"metrics": returned}, Outcome, from_attributes=True
        )
    except msgspec.ValidationError as error:
        raise StudyError(f"{target} returned {returned!r}: {error}; return a dict of numbers, or an Outcome") from error


def main() -> None:
    folder = Path(sys.argv[1])
    write_atomically(result_path(folder), msgspec.json.encode(run(folder)))


if __name__ == "__main__":
    from swarmq.studies import trial  # functions import its records from there, not from __main__

    trial.main()
