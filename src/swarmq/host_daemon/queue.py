"""Which queued runs may start. Pure.

Runs start in the order of their launch. None overtakes another one, so that a run that needs many GPUs gets its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swarmq.host_daemon.ledger import RunRecord


def list_queued(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the queued runs, the next one first."""
    return sorted((one for one in records if one.state == "queued"), key=lambda one: one.queued_at)


def choose_startable(
    records: Iterable[RunRecord], *, num_gpus: int, most_running: int
) -> Iterator[tuple[RunRecord, tuple[int, ...]]]:
    """Yield the runs that may start now, each with its GPUs. `num_gpus`, `most_running`: GPUs of the host, and runs that it may have at
    the same time."""
    records = list(records)
    running = [one for one in records if one.is_running]
    held = {gpu for one in running for gpu in one.gpus}
    free, room = [gpu for gpu in range(num_gpus) if gpu not in held], most_running - len(running)
    for record in list_queued(records):
        if room < 1 or record.num_gpus > len(free):
            return
        given, free, room = tuple(free[: record.num_gpus]), free[record.num_gpus :], room - 1
        yield record, given
