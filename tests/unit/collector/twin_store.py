"""The real store with the one in memory beside it: everything written to both, everything asked of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.state import EndedEpisode, Snapshot
from swarmq.collector.store import Store
from unit.collector.memory_store import MemoryStore


class TwinStore(Store):
    """A `Store` whose answers, and all that is in it after every transaction, are those of its twin."""

    def __init__(self, *, run: str) -> None:
        self.twin = MemoryStore()
        super().__init__(None, run=run)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            with super().transaction(), self.twin.transaction():
                yield
        finally:
            self.snapshot()
            self.outbox()

    def write(self, effect: do.Effect) -> None:
        super().write(effect)
        self.twin.write(effect)

    def ended(self, episode_id: str) -> EndedEpisode | None:
        return same(super().ended(episode_id), self.twin.ended(episode_id))

    def winner(self, slot_id: str) -> str | None:
        return same(super().winner(slot_id), self.twin.winner(slot_id))

    def group_closed(self, group_id: str) -> bool:
        return same(super().group_closed(group_id), self.twin.group_closed(group_id))

    def reply(self, command_id: str) -> dict[str, Any] | None:
        return same(super().reply(command_id), self.twin.reply(command_id))

    def snapshot(self) -> Snapshot:
        ours, theirs = super().snapshot(), self.twin.snapshot()
        same(_evals(ours), _evals(theirs))
        theirs.evals, evals = None, ours.evals
        ours.evals = None
        same(ours, theirs)
        ours.evals = evals
        return ours

    def outbox(self) -> list[do.Effect]:
        return same(super().outbox(), self.twin.outbox())

    def control(self) -> Any:
        return same(super().control(), self.twin.control())

    def parts(self, episode_id: str) -> Any:
        return same(super().parts(episode_id), self.twin.parts(episode_id))

    def payload(self, task_id: str) -> bytes | None:
        return same(super().payload(task_id), self.twin.payload(task_id))


def same(real: Any, twin: Any) -> Any:
    assert real == twin, f"the store says {real}, the one in memory {twin}"
    return real


def _evals(snapshot: Snapshot) -> Any:
    return snapshot.evals and (snapshot.evals.tasks, snapshot.evals.slots)
