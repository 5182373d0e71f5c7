"""The process of one trial: `python -m swarmq.studies.trial_process FOLDER` runs what FOLDER/attempt.json says, and writes
FOLDER/result.json.

A trial that was interrupted is started again in the same folder: `swarmq train` continues there, and a function may.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec

from swarmq.client.data.targets import load_object
from swarmq.errors import StudyError, SwarmqError
from swarmq.runtime.files import write_atomically
from swarmq.studies.trial import Order, TrialOutcome, order_path, result_path


def run(folder: Path) -> TrialOutcome:
    """Run the trial of a folder. The working directory is the folder of the study file."""
    order = msgspec.json.decode(order_path(folder).read_bytes(), type=Order)
    if order.plan.function:
        return call(order)
    from swarmq.studies.training import train  # noqa: PLC0415 - functions need none of its imports

    return train(order)


def call(order: Order) -> TrialOutcome:
    """Call the trial's function. Raises StudyError for an answer that is no result."""
    target = order.plan.function
    returned = load_object(target)(order.attempt)
    try:
        outcome = msgspec.convert(
            returned if isinstance(returned, TrialOutcome) else {"metrics": returned},
            TrialOutcome,
            from_attributes=True,
        )
    except msgspec.ValidationError as error:
        raise StudyError(
            f"{target} returned {returned!r}: {error}; return a dict of numbers, or a TrialOutcome"
        ) from error
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            raise StudyError(f"{target} returned {value} as {name!r}; a metric is a finite number")
    return outcome


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        write_atomically(result_path(folder), msgspec.json.encode(run(folder)))
    except SwarmqError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
