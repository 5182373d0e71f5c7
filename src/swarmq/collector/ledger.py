"""Read-only access to the collector's ledger, during and after a run: the fate of every episode, and the control state."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from swarmq.errors import CollectorError
from swarmq.messages import Change, Control


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one episode. Final states are `trained`, `dropped` (with a reason) and `eval`."""

    state: str
    """`open`, `waiting`, `published`, `trained`, `dropped` or `eval`."""
    reason: str
    slot: str
    kind: str
    client_id: str


def read_changes(path: Path) -> tuple[Change, ...]:
    """Return the changes made while the run was up, or () if there are none or no collector has run yet."""
    state = read_control(path)
    return state.changes if state else ()


def read_control(path: Path) -> Control | None:
    """Return the control state, or None if the run was never changed or no collector has run yet."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
            row = ledger.execute("SELECT body FROM control").fetchone()
    except sqlite3.Error:
        return None
    return msgspec.msgpack.decode(row[0], type=Control) if row else None


def read_fates(path: Path) -> dict[str, Fate]:
    """Return episode id -> fate. Raises CollectorError if there is no readable ledger at `path`."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
            rows = ledger.execute("SELECT id, state, reason, slot, kind, client FROM episodes").fetchall()
    except sqlite3.Error as error:
        raise CollectorError(
            f"{path}: no readable ledger ({error}): name the folder of a run that has begun"
        ) from error
    return {
        episode: Fate(state=state, reason=reason, slot=slot, kind=kind, client_id=client)
        for episode, state, reason, slot, kind, client in rows
    }
