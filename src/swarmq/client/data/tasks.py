"""Tasks that agents attempt, and the slots that attempts fill.

Users' lists may hold any objects; this module turns each into a `SwarmTask`. A slot is trained once in the life of a run, so
two starts of one script must not name the same slots by accident: epoch numbers are drawn at random for each client, unless the
caller gives one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from swarmq.errors import TaskError
from swarmq.messages import Slot

MAX_ID = 200
_EPOCH_SHIFT = 24
_EPOCH_BITS = 28
"""Number of random low bits in the number of an epoch. Numbers stay below 2**53, so that JSON and JavaScript keep them exact."""


class SwarmTask(msgspec.Struct, frozen=True):
    """A piece of data to attempt.

    id       identifier, at most 200 characters; the rewards of attempts at one id are compared with each other
    kind     kind of the task; None: the only kind of the run
    payload  data for the agent, which reads it as `ep.payload`
    """

    id: str
    kind: str | None = None
    payload: Any = None


def as_task(value: Any, *, default_id: str | None = None) -> SwarmTask:
    """Return `value` as a task, identified by its `id` or `task_id` (key or attribute), else by its content.

    Raises TaskError if the value has no id and its content gives no stable one.
    """
    if isinstance(value, SwarmTask):
        return _check_id(value)
    kind = _get_field(value, "kind")
    if kind is not None and not isinstance(kind, str):
        raise TaskError(f"the kind of a task is {kind!r}, not text")
    name = _get_field(value, "id")
    if name is None:
        name = _get_field(value, "task_id")
    if name is None:
        name = _hash_content(value) or default_id
    if name is None:
        raise TaskError(
            f"a task of type {type(value).__name__} has no `id` or `task_id` and no content to name it by: "
            "wrap it as SwarmTask(id=..., payload=...)"
        )
    return _check_id(SwarmTask(id=str(name), kind=kind, payload=value))


def make_queue_id(task: SwarmTask, kind: str, source: str = "") -> str:
    """Return the id of a task on the queue of its kind. It includes kind and data set, because two data sets may both begin
    with "1".

    `source`: mark of the data set (`hash_source_name`). Raises TaskError for a task of another kind.
    """
    if task.kind not in (None, kind):
        raise TaskError(
            f"task {task.id!r} is of kind {task.kind!r} by its own field, and is fed as {kind!r}: feed it as that kind, or "
            "leave `kind` out of its row"
        )
    return f"{kind}@{source}:{task.id}" if source else f"{kind}:{task.id}"


def strip_queue_id(fed: str, kind: str) -> str:
    """Return the id that a task had before it was put on the queue."""
    head, colon, name = fed.partition(":")
    return name if colon and (head == kind or head.startswith(f"{kind}@")) else fed


def hash_source_name(data: str) -> str:
    """Return a mark that distinguishes the tasks of one data set from those of others: a hash of its name or, for a file, of
    its path."""
    path = Path(data).expanduser()
    return hashlib.sha256((str(path.resolve()) if path.exists() else data).encode()).hexdigest()[:8]


class SlotNumbering:
    """Assigns slots to the attempts of one client: the repeats of a task fill a group, then a new group begins.

    Every group has an epoch number that no other client, and no other start of this client, uses.
    """

    def __init__(self, *, base: int | None = None) -> None:
        self._next_epoch = secrets.randbits(_EPOCH_BITS) << _EPOCH_SHIFT if base is None else base
        self._open: dict[str, Slot] = {}
        """Task id -> slot of its next attempt, while the task's group is incomplete."""

    def fresh_epoch(self) -> int:
        self._next_epoch += 1
        return self._next_epoch

    def next_slot(self, task_id: str, group_size: int) -> Slot:
        slot = self._open.pop(task_id, None) or Slot(task_id=task_id, epoch=self.fresh_epoch())
        if slot.repeat + 1 < group_size:
            self._open[task_id] = Slot(task_id=task_id, repeat=slot.repeat + 1, epoch=slot.epoch)
        return slot


def _get_field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _hash_content(value: Any) -> str | None:
    try:
        body = msgspec.msgpack.encode(value, order="deterministic")
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return hashlib.sha256(body).hexdigest()[:16]


def _check_id(task: SwarmTask) -> SwarmTask:
    name: object = task.id  # a struct does not check what it is given
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
        raise TaskError(f"task id {name!r} must be text of 1 to {MAX_ID} characters")
    return task
