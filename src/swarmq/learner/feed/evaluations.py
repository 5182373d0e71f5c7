"""Evaluation results on their way to the trainer's trackers, kept on disk until they are logged.

collector ──> <policy>.control ──> this file ──> ack ──> trainer ──> trackers ──> EvaluationLogged ──> marked here

The collector computes the results, but only the learner has the trackers. Results travel in the control queue, which is durable
and leads to the learner: an event would be lost while this process or the broker is away, and a file of the collector may be on
another host. Results are acknowledged once they are in the file, and sent to the trainer until it reports that it has logged
them. If a trainer is killed between logging a round and reporting it, the next trainer logs the round again, with the same values
at the same version.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarmq.learner.store.durable_files import map_os_errors
from swarmq.messages import Evaluation
from swarmq.runtime.files import read_or_reset, write_atomically

MAX_KNOWN = 1000
"""Number of the newest logged rounds that are recognised when they are delivered again."""


class StoredEvaluations(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file with evaluation results."""

    waiting: tuple[Evaluation, ...] = ()
    logged: tuple[float, ...] = ()
    """Start times (Unix) of the newest rounds that trackers have, oldest first."""


DECODER = msgspec.msgpack.Decoder(StoredEvaluations)


class WaitingEvaluations:
    """Evaluation results that trackers do not have yet. Methods raise LearnerError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with map_os_errors(path):
            self._kept = read_or_reset(
                path, DECODER.decode, StoredEvaluations(), action="evaluation results in it do not reach trackers"
            )

    @property
    def first(self) -> Evaluation | None:
        """Oldest results that trackers do not have; None if they have all."""
        return self._kept.waiting[0] if self._kept.waiting else None

    def add(self, evaluation: Evaluation) -> None:
        """Store results, unless they are stored or logged already."""
        kept = self._kept
        if evaluation.began_at not in {*kept.logged, *(one.began_at for one in kept.waiting)}:
            self._write(msgspec.structs.replace(kept, waiting=(*kept.waiting, evaluation)))

    def mark_logged(self, began_at: float) -> None:
        """Record that trackers have the results of the round."""
        waiting = tuple(one for one in self._kept.waiting if one.began_at != began_at)
        if len(waiting) < len(self._kept.waiting):
            self._write(StoredEvaluations(waiting=waiting, logged=(*self._kept.logged, began_at)[-MAX_KNOWN:]))

    def _write(self, kept: StoredEvaluations) -> None:
        with map_os_errors(self._path):
            write_atomically(self._path, msgspec.msgpack.encode(kept))
        self._kept = kept
