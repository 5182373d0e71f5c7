"""The newest control state that this learner has received, stored on disk, and the settings that follow from it.

The collector always sends the whole state, so the highest number wins, whatever was lost or repeated. A state is on disk before
its message is acknowledged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from swarmq import live_settings
from swarmq.config import SwarmJob, Train
from swarmq.learner.feed.batcher import BatchLimits
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.store.routing_shape import RoutingShape
from swarmq.messages import Control
from swarmq.runtime.files import read_or_reset, write_atomically


class StoredControl(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the control-state file."""

    state: Control
    checkpoints: int = 0
    """Number of requested checkpoints that have been written."""


DECODER = msgspec.msgpack.Decoder(StoredControl)


class ControlState:
    """Control state of this learner. Methods raise LearnerError if the file cannot be written."""

    def __init__(self, path: Path, file: SwarmJob, policy: str) -> None:
        self._path, self._file, self._policy = path, file, policy
        with map_os_errors(path):
            nothing = StoredControl(state=Control(run=file.run, number=0))
            self._kept = read_or_reset(
                path, DECODER.decode, nothing, action="the collector sends it again at its start"
            )
        self._settle()

    @property
    def state(self) -> Control:
        return self._kept.state

    @property
    def checkpoint_due(self) -> bool:
        return self.state.checkpoints > self._kept.checkpoints

    def take(self, state: Control) -> bool:
        """Store a state and apply it if it is newer. Returns whether it was newer."""
        if state.number <= self.state.number:
            return False
        self._write(msgspec.structs.replace(self._kept, state=state))
        return True

    def record_checkpoints(self, number: int) -> None:
        """Record that the requested checkpoints up to `number` are written."""
        self._write(msgspec.structs.replace(self._kept, checkpoints=max(number, self._kept.checkpoints)))

    def limits(
        self, *, vocab_size: int | None, max_length: int | None, routing: RoutingShape | None = None
    ) -> BatchLimits:
        """Return the limits of batches under the present settings."""
        groups, changes = self.job.groups, self.state.changes
        return BatchLimits(
            groups_per_batch=groups.groups_per_batch,
            mix=self.job.mix,
            stretches=live_settings.mix_stretches(
                self._file, changes, lambda change: change.from_step.get(self._policy, 0)
            ),
            lent=self.state.lent,
            max_staleness=groups.max_staleness,
            min_group=groups.min_group,
            group_size=max(self.job.group_size(kind) for kind in self.job.task_kinds),
            vocab_size=vocab_size,
            max_length=max_length,
            routing=routing,
            train=self.train,
            control=self.state.number,
        )

    def answer(self, next_step: int) -> dict[str, Any]:
        """Return the fields of the event that answers the newest command: the changes for this policy, and the step from which
        they apply."""
        news = [
            change
            for change in self.state.changes
            if change.number == self.state.number and live_settings.policy_of_path(change.path) in (None, self._policy)
        ]
        changes = [
            {
                "path": change.path,
                "before": change.before,
                "value": change.value,
                "from_step": max(change.from_step.get(self._policy, 0), next_step),
            }
            for change in news
        ]
        return {
            "state": "applied",
            "command_id": self.state.command_id,
            "number": self.state.number,
            "policy": self._policy,
            "pace": self.state.pace,
            "from_step": next_step,
            "changes": changes,
        }

    def _write(self, kept: StoredControl) -> None:
        with map_os_errors(self._path):
            write_atomically(self._path, msgspec.msgpack.encode(kept))
        self._kept = kept
        self._settle()

    def _settle(self) -> None:
        self.job = live_settings.apply_changes(self._file, self.state.changes)
        """Settings in effect."""
        self.train: Train = self.job.train_of(self._policy)
