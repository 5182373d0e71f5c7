"""Progress of the reports on log records. The number of the newest confirmed record is on disk, so that a restart forgets no
report."""

from __future__ import annotations

from pathlib import Path

from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.store.records import BatchIndex
from swarmq.runtime.files import write_atomically


class ReportOffsets:
    """Progress of one learner's reports. Reports up to record `through` are confirmed by the broker; later reports are
    repeated after a restart."""

    def __init__(self, path: Path, log: BatchLog) -> None:
        self.path, self.log = path, log
        self.through = max(_number(path), log.places[0].index.record - 1 if log.places else 0)
        self._confirmed: set[int] = set()

    def due(self, version: int) -> list[BatchIndex]:
        """Return the unconfirmed records of steps up to `version`, in order."""
        if not self.log.last or self.log.last.record == self.through:
            return []
        first = self.log.places[0].index.record
        places = self.log.places[max(0, self.through + 1 - first) :]
        return [
            place.index
            for place in places
            if place.index.version <= version and place.index.record not in self._confirmed
        ]

    def newest(self, num_episodes: int) -> list[BatchIndex]:
        """Return the newest confirmed records, oldest first, until they hold `num_episodes` episodes."""
        found: list[BatchIndex] = []
        for place in reversed(self.log.places):
            index = place.index
            if num_episodes <= 0:
                break
            if index.record <= self.through or index.record in self._confirmed:
                found.append(index)
                num_episodes -= len(index.trained) + len(index.dropped)
        return found[::-1]

    def confirm(self, record: int) -> None:
        """Mark the report on a record as confirmed by the broker. If this file is lost, reports are repeated, which the
        collector recognises.

        Raises LearnerError if the file cannot be written.
        """
        self._confirmed.add(record)
        while self.through + 1 in self._confirmed:
            self.through += 1
            self._confirmed.discard(self.through)
        with map_os_errors(self.path):
            write_atomically(self.path, str(self.through).encode())


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
