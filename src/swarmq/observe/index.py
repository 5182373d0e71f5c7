"""The index of a run's episodes: one SQLite file per run in the user's cache, built from the run folder, which is never written.

  events.jsonl      rewards, durations and code versions of ended episodes ─┐
  transcripts       facts about every closed episode ───────────────────────┼──> <cache>/swarmq/index/<digest>.sqlite ──> rows,
  <policy>/batches  rewards, turns, steps of trained episodes ──────────────┤                                             counts
  collector.sqlite  every episode ever, and its state ──────────────────────┘

`RunIndex.update` reads what is new, in portions. Each portion is one transaction, which also stores how far it has read, so an
update can be interrupted and repeated, and several processes may update one index. The ledger is read last and decides on the
state. Short read transactions never block the collector. A folder that was replaced by another run is recognised, and its index
is built anew.
"""

# ruff: noqa: S608 - statements are put together from constants of this module, never from input

from __future__ import annotations

import base64
import difflib
import hashlib
import math
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from swarmq.broker.client_rules import NAME_SEPARATOR
from swarmq.config import RunFolder
from swarmq.errors import ConfigError, EpisodeError, LearnerError, SwarmqError
from swarmq.learner.feed.batch_summary import newest_version, oldest_version, rollout_s
from swarmq.learner.store import batch_log
from swarmq.learner.store.batch_log import RecordPlace
from swarmq.learner.store.records import BatchIndex
from swarmq.messages import EpisodeBegin, EpisodeEnd, Event, Message, Rollout
from swarmq.observe.live_runs import load_stored_run
from swarmq.observe.reasons import EXPLANATIONS, FAILED, explain
from swarmq.registries.clients import read_clients as read_registry
from swarmq.transcripts import read as transcripts
from swarmq.transcripts.format import Position, TranscriptMeta

SCHEMA = "3"
"""Version of the index's tables; an index with tables of another version is built anew."""
PORTION = 5000
"""Maximum number of rows that one transaction reads or writes."""
EVENT_BYTES = 8 * 1024 * 1024
BUSY_S = 30.0
UNUSED_S = 60 * 86_400.0
"""Seconds after which an index that was not opened again is removed."""
CHECK_COST = 50
"""Factor: the whole ledger is counted again at the earliest after this many times the duration of the last count."""
LIVE = ("open", "waiting", "published")
STATES = (*LIVE, "trained", "dropped", "failed", "eval", "stray")
SORTS = ("began_at", "reward", "seconds", "turns", "sampled_tokens", "staleness", "step")
MAX_NAMED = 8
"""Maximum number of known values that an error message lists."""
LOWEST = -1e308
"""Value that stands for a missing value in sorting."""

TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE episodes (
    id TEXT NOT NULL UNIQUE, state TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '', mode TEXT NOT NULL DEFAULT '',
    kind TEXT NOT NULL DEFAULT '', slot TEXT NOT NULL DEFAULT '', task TEXT NOT NULL DEFAULT '', grp TEXT NOT NULL DEFAULT '',
    attempt INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL DEFAULT 0, client TEXT NOT NULL DEFAULT '',
    code_version TEXT NOT NULL DEFAULT '', policies TEXT NOT NULL DEFAULT '', status TEXT NOT NULL DEFAULT '',
    detail TEXT NOT NULL DEFAULT '', reward REAL, success INTEGER, turns INTEGER NOT NULL DEFAULT 0,
    sampled_tokens INTEGER NOT NULL DEFAULT 0, began_at REAL NOT NULL DEFAULT 0, seconds REAL, step INTEGER, staleness INTEGER,
    oldest INTEGER, ended REAL, place TEXT, in_ledger INTEGER NOT NULL DEFAULT 0, begun INTEGER NOT NULL DEFAULT 1,
    fate TEXT NOT NULL GENERATED ALWAYS AS (
        CASE WHEN in_ledger AND NOT begun THEN 'stray' WHEN state IN {LIVE} THEN state WHEN mode = 'eval' OR state = 'eval' THEN 'eval'
        WHEN state = 'dropped' AND reason IN {FAILED} THEN 'failed' ELSE state END
    ) VIRTUAL
);
CREATE INDEX by_time ON episodes (began_at, id);
CREATE INDEX by_fate ON episodes (fate, reason, began_at, id);
CREATE INDEX by_group ON episodes (grp);
CREATE INDEX live ON episodes (state) WHERE state IN {LIVE};
CREATE TABLE members (
    episode TEXT NOT NULL, policy TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT NOT NULL, segment TEXT NOT NULL,
    at INTEGER NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (episode, policy)
) WITHOUT ROWID;
CREATE INDEX by_step ON members (policy, step);
"""
SECONDS = "coalesce(seconds, ended - began_at)"
COLUMNS = (
    "id, fate, reason, CASE WHEN mode != '' THEN mode WHEN state = 'eval' THEN 'eval' ELSE 'train' END, kind, task, slot, grp, attempt, "
    "client, code_version, reward, success, turns, sampled_tokens, began_at, "
    f"{SECONDS}, step, staleness, place IS NOT NULL"
)

_event = msgspec.json.Decoder(Event)
_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One episode in a list."""

    id: str
    state: str
    """`open`, `waiting`, `published`, `trained`, `dropped`, `failed` (dropped without a usable end), `eval`, or
    `stray` (its begin never came)."""
    reason: str
    """Why it was dropped or failed; for an evaluation episode, its status."""
    mode: str
    kind: str
    task: str
    slot: str
    group: str
    attempt: int
    client: str
    code_version: str
    reward: float | None
    """Mean reward over the episode's policies; None if it has no reward."""
    success: bool | None
    turns: int
    sampled_tokens: int
    began_at: float
    seconds: float | None
    step: int | None
    """Step that trained it, or before which its learner dropped it."""
    staleness: int | None
    has_transcript: bool


class EpisodePage(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[EpisodeRow]
    total: int
    """Number of episodes that match the filter."""
    next: str | None
    """Cursor of the next page; None on the last page."""


class EpisodeFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter for episodes; an empty field matches all."""

    state: str = ""
    """One of `STATES`, or several separated by commas."""
    reason: str = ""
    mode: str = ""
    kind: str = ""
    client: str = ""
    """Id of a client, name of its invite, or beginning of client ids, tried in this order."""
    task: str = ""
    policy: str = ""
    step: int | None = None
    group: str = ""
    code_version: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    reward_below: float | None = None
    """Like `reward_max`, but without the value itself; `reward_above` likewise for `reward_min`."""
    reward_above: float | None = None
    text: str = ""
    """Part of the episode's id."""


def parse_filter(chosen: Mapping[str, Any]) -> EpisodeFilter:
    """Return the filter that `chosen` (field -> value) describes. Numbers may be given as text. Raises ConfigError that names
    the field and its value."""
    found: dict[str, Any] = {}
    for name, value in chosen.items():
        if name not in EpisodeFilter.__struct_fields__:
            raise ConfigError(
                f"{name}: not a filter of episodes; the filters are {', '.join(EpisodeFilter.__struct_fields__)}"
            )
        if value is None or value == "":
            continue
        shown = repr(value)[:60]
        if name == "step":
            found[name] = _parse_number(value, int)
            if found[name] is None or not 0 <= found[name] < 2**31:
                raise ConfigError(f"{name}: {shown} is not a step number")
        elif name.startswith("reward_"):
            found[name] = _parse_number(value, float)
            if found[name] is None:
                raise ConfigError(f"{name}: {shown} is not a number")
        elif isinstance(value, str):
            found[name] = value
        else:
            raise ConfigError(f"{name}: {shown} is not text")
    return EpisodeFilter(**found)


def _parse_number(value: Any, kind: type[int | float]) -> Any:
    """Return the value as a number of this kind; None if it is not one, or not finite."""
    try:
        number = kind(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and math.isfinite(number) else None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    edges: list[float]
    """Edges of the bins, one more than `counts`."""
    counts: list[int]


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """The account of all episodes: begun = trained + dropped + failed + open + waiting + published."""

    begun: int
    trained: int
    open: int
    waiting: int
    published: int
    dropped: dict[str, int]
    """Reason -> number of finished episodes that were not trained."""
    failed: dict[str, int]
    """Reason -> number of episodes without a usable end."""
    evaluated: dict[str, int]
    """Status or reason -> number of evaluation episodes, which are not in `begun`."""
    stray: dict[str, int]
    """Reason, or `open` -> number of episodes whose begin never came, which are not in `begun`."""
    is_balanced: bool
    """Whether the account adds up exactly, and agrees with the collector's own counters for every reason."""
    explanations: dict[str, str]
    """Reason -> what it means and what to do."""


class IndexProgress(msgspec.Struct, frozen=True, kw_only=True):
    episodes: int
    share: float
    """Share of the folder that is read, from 0 to 1."""
    is_done: bool
    notes: tuple[str, ...] = ()
    """Messages about files that could not be read, and what is missing because of that."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the batch log in which an episode was trained or dropped."""

    policy: str
    step: int
    reason: str
    """Why it was dropped; empty if it was trained."""
    segment: str
    at: int
    size: int


class Indexed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the index knows about an episode beyond its row."""

    row: EpisodeRow
    size: int
    """Size of its group; 0 if not known."""
    status: str
    detail: str
    transcript: Position | None
    places: tuple[Place, ...]


def cache_folder() -> Path:
    """Return the folder of all indices."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmq" / "index"


class RunIndex:
    """The index of one run. Its methods may be called from several threads."""

    def __init__(self, folder: RunFolder, *, cache: Path | None = None) -> None:
        """Open or create the index. Raises ConfigError if neither the folder nor the cache can be used."""
        if not folder.path.is_dir():
            raise ConfigError(f"{folder.path}: there is no such folder; runs are in runs/ by default")
        self.folder = folder
        self.path = (cache or cache_folder()) / f"{_digest(str(folder.path.resolve()))}.sqlite"
        self._update = threading.Lock()
        self._flaws: dict[str, str] = {}
        self._share, self._is_done = 0.0, False
        self._counted_at, self._count_cost = float("-inf"), 0.0
        self._seen: dict[str, tuple[int, ...]] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_old(self.path.parent, keep=self.path)
            try:
                self._prepare()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:  # a damaged file: everything in it can be read again
                _remove(self.path)
                self._prepare()
            self.path.touch()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{self.path}: the index of {folder.path} cannot be written there ({error}): set XDG_CACHE_HOME to another folder"
            ) from error

    # ---------------------------------------------------------------------------------------- building

    @property
    def progress(self) -> IndexProgress:
        with self._reading() as db:
            (episodes,) = db.execute("SELECT count(*) FROM episodes").fetchone()
        return IndexProgress(
            episodes=episodes, share=self._share, is_done=self._is_done, notes=tuple(self._flaws.values())
        )

    def update(self, *, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Read everything that is new in the folder, and return whether there was anything. Files that cannot be read are
        noted in `progress`."""
        with self._update, closing(self._connect()) as db:
            before = db.total_changes
            self._flaws = {}
            try:
                if self._was_replaced(db):
                    self._rebuild(db)
                sources = (self._read_events, self._read_transcripts, self._read_batches, self._read_ledger)
                for number, source in enumerate(sources):
                    for share in source(db):
                        self._share = max(self._share, (number + share) / len(sources)) if not self._is_done else 1.0
                        if is_cancelled():
                            return True
            except ConfigError as error:
                self._flaws["index"] = str(error)
                raise
            self._share, self._is_done = 1.0, True
            return db.total_changes > before

    def _prepare(self) -> None:
        with closing(self._connect()) as db:
            if self._is_usable(db):
                return
            db.execute("BEGIN EXCLUSIVE")
            if self._is_usable(db):  # another process has just built it
                return
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            ).fetchall():
                db.execute(f'DROP TABLE "{name}"')
            for statement in filter(None, map(str.strip, TABLES.split(";"))):
                db.execute(statement)
            _set(db, "schema", SCHEMA)
            _set(db, "folder", str(self.folder.path.resolve()))
            db.execute("COMMIT")

    def _is_usable(self, db: sqlite3.Connection) -> bool:
        try:
            return _get(db, "schema") == SCHEMA
        except sqlite3.OperationalError:
            return False

    def _rebuild(self, db: sqlite3.Connection) -> None:
        with _transaction(db):
            db.execute("DELETE FROM episodes")
            db.execute("DELETE FROM members")
            db.execute("DELETE FROM meta WHERE key NOT IN ('schema', 'folder')")
        self._share, self._is_done, self._seen = 0.0, False, {}

    def _was_replaced(self, db: sqlite3.Connection) -> bool:
        """Return whether the folder holds another run now: its ledger lacks episodes of the index, although a ledger keeps
        every episode forever."""
        known = db.execute(
            "SELECT id FROM (SELECT id FROM episodes WHERE in_ledger ORDER BY rowid LIMIT 2) "
            "UNION SELECT id FROM (SELECT id FROM episodes WHERE in_ledger ORDER BY rowid DESC LIMIT 2)"
        ).fetchall()
        if not known or not self.folder.inbox.exists():
            return False
        try:
            with open_ledger(self.folder) as ledger:
                return any(
                    ledger.execute("SELECT 1 FROM episodes WHERE id = ?", row).fetchone() is None for row in known
                )
        except EpisodeError:
            return False

    def _read_events(self, db: sqlite3.Connection) -> Iterator[float]:
        """Read ended episodes from the event file. For runs without transcripts, it is the only source of rewards of
        untrained episodes."""
        path = self.folder.events
        try:
            size = path.stat().st_size
            while True:
                offset = int(_get(db, "events") or 0)
                if size <= offset:
                    break
                with path.open("rb") as file:
                    file.seek(offset)
                    chunk = file.read(EVENT_BYTES)
                whole = chunk.rfind(b"\n") + 1
                if not whole:
                    break
                rows = list(_rows_of_events(chunk[:whole]))
                with _transaction(db):
                    if int(_get(db, "events") or 0) == offset:
                        db.executemany(EVENT_UPSERT, rows)
                        _set(db, "events", str(offset + whole))
                yield (offset + whole) / size
        except FileNotFoundError:
            pass
        except OSError as error:
            self._flaws["events"] = f"{path}: cannot be read ({error.strerror}); rewards of episodes may be missing"

    def _read_transcripts(self, db: sqlite3.Connection) -> Iterator[float]:
        folder = self.folder.transcripts
        rewritten = self._forget_rewritten(db)
        for portion in _portions(
            (position, meta) for segment in rewritten for position, meta in transcripts.scan_segment(folder, segment)
        ):
            with _transaction(db):
                db.executemany(TRANSCRIPT_UPSERT, [_row_of_meta(position, meta) for position, meta in portion])
            yield 0.0
        while True:
            raw = _get(db, "transcripts")
            after = msgspec.json.decode(raw, type=Position) if raw else None
            portion = list(islice(transcripts.scan(folder, after=after), PORTION))
            if not portion:
                return
            with _transaction(db):
                if _get(db, "transcripts") == raw:
                    db.executemany(TRANSCRIPT_UPSERT, [_row_of_meta(position, meta) for position, meta in portion])
                    _set(db, "transcripts", msgspec.json.encode(portion[-1][0]).decode())
            yield 0.5

    def _forget_rewritten(self, db: sqlite3.Connection) -> list[int]:
        """Forget the places of transcripts in segments that were rewritten or removed, and return the rewritten ones."""
        now = transcripts.generations(self.folder.transcripts)
        before = msgspec.json.decode(_get(db, "generations") or "{}", type=dict[int, int])
        if now == before:
            return []
        changed = [segment for segment, generation in before.items() if now.get(segment) != generation]
        with _transaction(db):
            for segment in changed:
                db.execute("UPDATE episodes SET place = NULL WHERE place LIKE ?", (f"[{segment},%",))
            _set(db, "generations", msgspec.json.encode(now).decode())
        return [segment for segment in changed if segment in now]

    def _read_batches(self, db: sqlite3.Connection) -> Iterator[float]:
        folders = sorted(path.parent.name for path in self.folder.path.glob("*/batches"))
        for policy in folders:
            folder, key = self.folder.batch_log(policy), f"batches:{policy}"
            state = tuple(
                n
                for path in sorted(folder.glob("*.log"))
                for n in (int(path.stem) if path.stem.isdecimal() else 0, _size(path))
            )
            raw = _get(db, key)
            if raw and self._seen.get(policy) == state:
                continue
            after = _place_of(folder, raw) if raw else None
            places, flaws = batch_log.scan_readable(folder, after=after)
            for flaw in flaws:
                self._flaws[f"{key}:{flaw}"] = (
                    f"{flaw} (episodes in that part are shown as far as other files know them)"
                )
            newest = int(_get(db, f"trained:{policy}") or 0)
            for number, (step, place) in enumerate(batch_log.number_steps(places, trained=newest)):
                rows = self._rows_of_record(db, policy, place)
                with _transaction(db):
                    where = (place.segment.name, place.offset, place.size)
                    fates = [*((one, "") for one in place.index.trained), *place.index.dropped.items()]
                    db.executemany(
                        "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?)",
                        [(episode, policy, step, reason, *where) for episode, reason in fates],
                    )
                    db.executemany(
                        "INSERT INTO episodes (id, step) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET step = excluded.step",
                        [(episode, step) for episode, _ in fates],
                    )
                    db.executemany(ROLLOUT_UPSERT, rows)
                    if place.index.trained:
                        _set(db, f"trained:{policy}", str(step))
                    _set(db, key, msgspec.json.encode([place.segment.name, place.offset, place.size]).decode())
                yield number / len(places)
            self._seen[policy] = state

    def _rows_of_record(self, db: sqlite3.Connection, policy: str, place: RecordPlace) -> list[tuple[Any, ...]]:
        """Return the rows of the trained episodes of a record, unless transcripts have provided all facts about them."""
        trained = place.index.trained
        marks = ",".join("?" * len(trained))
        (num_complete,) = db.execute(
            f"SELECT count(*) FROM episodes WHERE staleness IS NOT NULL AND status != '' AND id IN ({marks})",
            trained,
        ).fetchone()
        if num_complete == len(trained):
            return []
        try:
            record = batch_log.read_record(place)
        except LearnerError as error:
            self._flaws[f"record:{policy}:{place.index.record}"] = str(error)
            return []
        return [_row_of_rollout(episode, record.index) for episode in record.episodes]

    def _read_ledger(self, db: sqlite3.Connection) -> Iterator[float]:
        try:
            with open_ledger(self.folder) as ledger:
                yield from self._follow_ledger(db, ledger)
        except EpisodeError as error:
            self._flaws["ledger"] = f"{error}; states and counts are those of the other files"
        except sqlite3.DatabaseError as error:
            self._flaws["ledger"] = (
                f"{self.folder.inbox}: damaged, or copied while it was written ({error}); copy it again with its -wal"
            )

    def _follow_ledger(self, db: sqlite3.Connection, ledger: sqlite3.Connection) -> Iterator[float]:
        total = 0
        while not _get(db, "ledger_read"):
            last = _get(db, "ledger") or ""
            rows = ledger.execute(f"{LEDGER_ROWS} WHERE id > ? ORDER BY id LIMIT ?", (last, PORTION)).fetchall()
            if not rows:
                break
            self._write_ledger(db, ledger, rows, last=rows[-1][0])
            if not total:
                (total,) = ledger.execute("SELECT count(*) FROM episodes").fetchone()
            (done,) = db.execute("SELECT count(*) FROM episodes WHERE in_ledger").fetchone()
            yield min(done / max(total, 1), 1.0)
        while not self._catch_up(db, ledger):
            yield 1.0

    def _catch_up(self, db: sqlite3.Connection, ledger: sqlite3.Connection) -> bool:
        """Read new, live and just settled episodes and the counters in one short transaction. Return whether
        the whole ledger has been read by then."""
        last = _get(db, "ledger") or ""
        known_live = {row[0] for row in db.execute(f"SELECT id FROM episodes WHERE state IN {LIVE}")}
        ledger.execute("BEGIN")
        try:
            rows = {
                row[0]: row
                for row in ledger.execute(f"{LEDGER_ROWS} WHERE id > ? ORDER BY id LIMIT ?", (last, PORTION))
            }
            is_all = len(rows) < PORTION
            last = max(rows, default=last)
            rows |= {row[0]: row for row in ledger.execute(f"{LEDGER_ROWS} WHERE state IN {LIVE}")}
            for episode in known_live - rows.keys():
                if row := ledger.execute(f"{LEDGER_ROWS} WHERE id = ?", (episode,)).fetchone():
                    rows[episode] = row
            rows |= self._find_missed(db, ledger, rows)
            counts = dict(ledger.execute("SELECT name, value FROM counts").fetchall())
            turns = dict(
                ledger.execute(
                    "SELECT episode, sum(instr(substr(body, 1, 20), x'736572766564') = 0) FROM turns GROUP BY episode"
                ).fetchall()
            )
            outcomes = self._outcomes(ledger, rows)
        finally:
            ledger.execute("ROLLBACK")
        with _transaction(db):
            self._put(db, rows.values(), outcomes)
            db.executemany(
                "UPDATE episodes SET turns = ? WHERE id = ? AND turns != ?", [(n, one, n) for one, n in turns.items()]
            )
            for key, value in (
                ("ledger", last),
                ("ledger_read", "yes"),
                ("counts", msgspec.json.encode(counts).decode()),
            ):
                if _get(db, key) != value:
                    _set(db, key, value)
        return is_all

    def _find_missed(
        self, db: sqlite3.Connection, ledger: sqlite3.Connection, known: Iterable[str]
    ) -> dict[str, tuple[Any, ...]]:
        """Return the rows of episodes whose ids sort before ids that were read earlier, because their client's clock is slow
        or the client chose the id.

        They are detected by counting the ledger's rows, which is done the less often the longer it takes.
        """
        began = time.monotonic()
        if began - self._counted_at < CHECK_COST * self._count_cost:
            return {}
        (there,) = ledger.execute("SELECT count(*) FROM episodes").fetchone()
        have = {row[0] for row in db.execute("SELECT id FROM episodes WHERE in_ledger")} | set(known)
        found = {}
        if len(have) < there:
            for (episode,) in ledger.execute("SELECT id FROM episodes").fetchall():
                if episode not in have:
                    found[episode] = ledger.execute(f"{LEDGER_ROWS} WHERE id = ?", (episode,)).fetchone()
        self._counted_at = time.monotonic()
        self._count_cost = self._counted_at - began
        return found

    def _write_ledger(
        self, db: sqlite3.Connection, ledger: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], *, last: str
    ) -> None:
        outcomes = ledger.execute(
            "SELECT episode, max(version) FROM outcomes WHERE state = 'trained' AND episode BETWEEN ? AND ? GROUP BY episode",
            (rows[0][0], rows[-1][0]),
        ).fetchall()
        with _transaction(db):
            self._put(db, rows, outcomes)
            _set(db, "ledger", last)

    def _outcomes(self, ledger: sqlite3.Connection, episodes: Iterable[str]) -> list[tuple[str, int]]:
        found = []
        for episode in episodes:
            row = ledger.execute(
                "SELECT episode, max(version) FROM outcomes WHERE state = 'trained' AND episode = ?", (episode,)
            ).fetchone()
            if row[0] is not None:
                found.append(row)
        return found

    def _put(
        self, db: sqlite3.Connection, rows: Iterable[tuple[Any, ...]], outcomes: Iterable[tuple[str, int]]
    ) -> None:
        db.executemany(LEDGER_UPSERT, map(_row_of_ledger, rows))
        db.executemany(
            "UPDATE episodes SET step = ?1, staleness = coalesce(staleness, ?1 - 1 - oldest) WHERE id = ?2 AND state = 'trained' "
            "AND (step IS NULL OR staleness IS NULL)",
            [(version, episode) for episode, version in outcomes],
        )

    # ----------------------------------------------------------------------------------------- reading

    def page(
        self,
        chosen: EpisodeFilter | None = None,
        *,
        sort: str = "-began_at",
        cursor: str | None = None,
        limit: int = 100,
    ) -> EpisodePage:
        """Return one page of the episodes that match the filter. `sort`: one of `SORTS`, with `-` for the largest first.

        Raises ConfigError for an unknown order or an invalid cursor.
        """
        where, values = self._where(chosen)
        column, down = sort.removeprefix("-"), sort.startswith("-")
        if column not in SORTS:
            raise ConfigError(f"sort: {sort!r} is not one of {', '.join(SORTS)} (with - for the largest first)")
        key = column if column == "began_at" else f"coalesce({SECONDS if column == 'seconds' else column}, {LOWEST})"
        with self._reading() as db:
            (total,) = db.execute(f"SELECT count(*) FROM episodes WHERE {where}", values).fetchone()
            after = ""
            if cursor is not None:
                after = f" AND ({key}, id) {'<' if down else '>'} (?, ?)"
                values = [*values, *_decode_cursor(cursor)]
            order = "DESC" if down else "ASC"
            rows = db.execute(
                f"SELECT {COLUMNS}, {key} FROM episodes WHERE {where}{after} ORDER BY {key} {order}, id {order} LIMIT ?",
                [*values, limit + 1],
            ).fetchall()
        following = _encode_cursor(rows[limit - 1][-1], rows[limit - 1][0]) if len(rows) > limit else None
        return EpisodePage(rows=[_to_row(row) for row in rows[:limit]], total=total, next=following)

    def iterate(self, chosen: EpisodeFilter | None = None, *, sort: str = "-began_at") -> Iterator[EpisodeRow]:
        """Yield all episodes that match the filter."""
        cursor: str | None = None
        while True:
            page = self.page(chosen, sort=sort, cursor=cursor, limit=PORTION)
            yield from page.rows
            if (cursor := page.next) is None:
                return

    def count(self, chosen: EpisodeFilter | None = None) -> int:
        where, values = self._where(chosen)
        with self._reading() as db:
            return int(db.execute(f"SELECT count(*) FROM episodes WHERE {where}", values).fetchone()[0])

    def histogram(self, chosen: EpisodeFilter | None = None, *, of: str = "reward", bins: int = 20) -> Histogram:
        """Return a histogram of the episodes' rewards or staleness. Episodes without a value are left out."""
        if of not in {"reward", "staleness"}:
            raise ConfigError(f"of is {of!r}: give reward or staleness")
        where, values = self._where(chosen)
        with self._reading() as db:
            counts = Counter[float](
                dict(
                    db.execute(
                        f"SELECT {of}, count(*) FROM episodes WHERE {where} AND {of} IS NOT NULL GROUP BY 1",
                        values,
                    )
                )
            )
        return _histogram(counts, bins=bins, is_whole=of == "staleness")

    def ledger(self) -> LedgerView:
        """Return the account of all episodes."""
        with self._reading() as db:
            counts = Counter[str](msgspec.json.decode(_get(db, "counts") or "{}", type=dict[str, int]))
            is_read = _get(db, "counts") is not None
            groups = db.execute(
                "SELECT fate, reason, mode, state, begun, count(*) FROM episodes WHERE in_ledger OR ?1 GROUP BY 1, 2, 3, 4, 5",
                (not is_read,),
            ).fetchall()
        return _balance(groups, counts, is_read=is_read)

    def find(self, part: str) -> Indexed:
        """Return the episode whose id begins or ends with `part`. Raises EpisodeError if no or several episodes match."""
        if not part or "/" in part or "\\" in part or "\0" in part or part in {".", ".."}:
            raise EpisodeError(f"{part!r} is not an episode id")
        with self._reading() as db:
            ids = [row[0] for row in db.execute("SELECT id FROM episodes WHERE id = ?", (part,))] or [
                row[0]
                for row in db.execute(
                    "SELECT id FROM episodes WHERE substr(id, 1, ?1) = ?2 OR substr(id, -?1) = ?2 ORDER BY id LIMIT 4",
                    (len(part), part),
                )
            ]
            if not ids:
                raise EpisodeError(
                    f"no episode of the run begins or ends with {part!r}: `swarmq inspect RUN --limit 20` lists the newest"
                )
            if len(ids) > 1:
                raise EpisodeError(
                    f"several episodes begin or end with {part!r}, e.g. {', '.join(ids[:3])}: give a longer part"
                )
            *row, size, status, detail, place = db.execute(
                f"SELECT {COLUMNS}, size, status, detail, place FROM episodes WHERE id = ?",
                ids,
            ).fetchone()
            places = db.execute(
                "SELECT policy, step, reason, segment, at, size FROM members WHERE episode = ? ORDER BY policy", ids
            ).fetchall()
        return Indexed(
            row=_to_row(row),
            size=size,
            status=status,
            detail=detail,
            transcript=msgspec.json.decode(place, type=Position) if place else None,
            places=tuple(
                Place(policy=policy, step=step, reason=reason, segment=segment, at=at, size=size)
                for policy, step, reason, segment, at, size in places
            ),
        )

    def values(self, column: str, chosen: EpisodeFilter | None = None) -> dict[str, int]:
        """Return value -> number of episodes, for `kind`, `client`, `code_version`, `reason`, `state`, `mode` or `task`."""
        if column not in {"kind", "client", "code_version", "reason", "state", "mode", "task"}:
            raise ConfigError(f"{column!r} is not a column that can be counted")
        name = "fate" if column == "state" else column
        where, values = self._where(chosen)
        with self._reading() as db:
            return dict(
                db.execute(
                    f"SELECT {name}, count(*) FROM episodes WHERE {where} GROUP BY 1 ORDER BY 2 DESC", values
                ).fetchall()
            )

    def details(self, ids: Iterable[str]) -> dict[str, str]:
        """Return episode -> what its client said of its end, for those of these episodes of which a client said something."""
        statement = "SELECT id, detail FROM episodes WHERE detail != '' AND id IN (SELECT value FROM json_each(?))"
        return dict(self.query(statement, [msgspec.json.encode(list(ids)).decode()]))

    def check(self, chosen: EpisodeFilter) -> None:
        """Raise ConfigError if the filter names a kind, reason, client or policy that neither the run nor swarmq knows; an
        empty result would be misleading."""
        job = load_stored_run(self.folder.path)
        known: dict[str, Callable[[], Iterable[str]]] = {
            "kind": lambda: [*job.task_kinds, *self.values("kind")],
            "reason": lambda: [*self.values("reason"), *EXPLANATIONS],
            "policy": lambda: job.policies,
            "client": lambda: [*self.values("client"), *self._list_invited()],
        }
        for field, list_known in known.items():
            value = getattr(chosen, field)
            names = list(dict.fromkeys(filter(None, list_known()))) if value else []
            if value and not (_match_clients(value, names) if field == "client" else value in names):
                close = difflib.get_close_matches(value, names, n=MAX_NAMED) or names
                more = f", and {len(names) - MAX_NAMED} more" if len(close) > MAX_NAMED else ""
                listed = ", ".join(close[:MAX_NAMED]) + more
                raise ConfigError(
                    f"{field}: {value!r} is unknown in this run; {f'it has {listed}' if listed else 'it has none yet'}"
                )

    def _list_invited(self) -> Iterable[str]:
        """Return the names of invited clients, which may not have begun an episode; none in most copied folders."""
        try:
            return read_registry(self.folder.clients)
        except SwarmqError:
            return ()

    def _where(self, chosen: EpisodeFilter | None) -> tuple[str, list[Any]]:
        chosen = chosen or EpisodeFilter()
        clients = _match_clients(chosen.client, filter(None, self.values("client"))) if chosen.client else []
        return _conditions(chosen, clients)

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a SQL statement of this package on the index's tables."""
        with self._reading() as db:
            return db.execute(statement, values).fetchall()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_S, check_same_thread=False)
        for pragma in ("journal_mode=WAL", "synchronous=OFF", "cache_size=-16000"):
            db.execute(f"PRAGMA {pragma}")
        return db

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_S)) as db:
            db.execute("BEGIN")
            yield db


LEDGER_ROWS = (
    "SELECT id, state, reason, began_at, slot, kind, client, policies, "
    "CASE WHEN calls = '' THEN 0 ELSE length(calls) - length(replace(calls, char(10), '')) + 1 END, begin, end FROM episodes"
)
LEDGER_UPSERT = """
INSERT INTO episodes (id, state, reason, began_at, slot, task, grp, kind, client, policies, turns, mode, code_version, attempt, size,
    reward, success, begun, in_ledger)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)
ON CONFLICT (id) DO UPDATE SET state = excluded.state, reason = excluded.reason, began_at = excluded.began_at, in_ledger = 1,
    slot = CASE WHEN excluded.slot = '' THEN slot ELSE excluded.slot END,
    task = CASE WHEN excluded.task = '' THEN task ELSE excluded.task END,
    grp = CASE WHEN excluded.grp = '' THEN grp ELSE excluded.grp END,
    kind = CASE WHEN excluded.kind = '' THEN kind ELSE excluded.kind END,
    client = CASE WHEN excluded.client = '' THEN client ELSE excluded.client END,
    policies = CASE WHEN excluded.policies = '' THEN policies ELSE excluded.policies END,
    mode = CASE WHEN mode = '' THEN excluded.mode ELSE mode END,
    code_version = CASE WHEN code_version = '' THEN excluded.code_version ELSE code_version END,
    attempt = max(attempt, excluded.attempt), size = max(size, excluded.size),
    turns = CASE WHEN turns = 0 THEN excluded.turns ELSE turns END,
    reward = coalesce(reward, excluded.reward), success = coalesce(success, excluded.success),
    begun = max(excluded.begun, begun AND in_ledger)
WHERE state != excluded.state OR reason != excluded.reason OR in_ledger = 0 OR begun < excluded.begun
    OR (reward IS NULL AND excluded.reward IS NOT NULL) OR (mode = '' AND excluded.mode != '')
"""
EVENT_UPSERT = """
INSERT INTO episodes (id, mode, kind, client, code_version, status, detail, reward, success, seconds, ended, policies)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET mode = excluded.mode,
    code_version = CASE WHEN code_version = '' THEN excluded.code_version ELSE code_version END,
    status = CASE WHEN status = '' THEN excluded.status ELSE status END,
    detail = CASE WHEN detail = '' THEN excluded.detail ELSE detail END,
    reward = coalesce(reward, excluded.reward), success = coalesce(success, excluded.success),
    seconds = coalesce(seconds, excluded.seconds), ended = excluded.ended
"""
TRANSCRIPT_UPSERT = """
INSERT INTO episodes (id, state, reason, mode, kind, slot, task, grp, attempt, size, client, code_version, policies, status, detail,
    reward, success, turns, sampled_tokens, began_at, ended, seconds, step, staleness, oldest, place)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET state = CASE WHEN in_ledger THEN state ELSE excluded.state END,
    reason = CASE WHEN in_ledger THEN reason ELSE excluded.reason END, mode = excluded.mode, kind = excluded.kind,
    slot = excluded.slot, task = excluded.task, grp = excluded.grp, attempt = excluded.attempt, size = excluded.size,
    client = excluded.client, code_version = excluded.code_version, policies = excluded.policies, status = excluded.status,
    detail = excluded.detail, reward = excluded.reward, success = excluded.success, turns = excluded.turns,
    sampled_tokens = excluded.sampled_tokens, began_at = excluded.began_at, ended = excluded.ended, seconds = excluded.seconds,
    step = coalesce(excluded.step, step), staleness = coalesce(excluded.staleness, staleness), oldest = excluded.oldest,
    place = excluded.place
"""
ROLLOUT_UPSERT = """
INSERT INTO episodes (id, state, mode, kind, slot, task, grp, attempt, size, client, code_version, policies, reward, success, turns,
    sampled_tokens, began_at, seconds, staleness, oldest)
VALUES (?, 'trained', 'train', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET state = CASE WHEN in_ledger THEN state ELSE 'trained' END, mode = 'train', kind = excluded.kind,
    slot = excluded.slot, task = excluded.task, grp = excluded.grp, attempt = excluded.attempt, size = excluded.size,
    client = excluded.client, code_version = excluded.code_version,
    policies = CASE WHEN instr(policies, excluded.policies) THEN policies ELSE policies || excluded.policies END,
    reward = coalesce(reward, excluded.reward), success = coalesce(success, excluded.success),
    turns = max(turns, excluded.turns), sampled_tokens = max(sampled_tokens, excluded.sampled_tokens),
    began_at = CASE WHEN began_at = 0 THEN excluded.began_at ELSE began_at END, seconds = coalesce(seconds, excluded.seconds),
    staleness = max(coalesce(staleness, 0), excluded.staleness), oldest = min(coalesce(oldest, excluded.oldest), excluded.oldest)
"""


@contextmanager
def open_ledger(folder: RunFolder) -> Iterator[sqlite3.Connection]:
    """Open the collector's store of a live, stopped or copied run for reading; nothing in the folder changes.

    Raises EpisodeError if there is no readable store.
    """
    path, journal = folder.inbox, folder.inbox.with_name(folder.inbox.name + "-wal")
    with tempfile.TemporaryDirectory(prefix="swarmq-") as scratch:
        try:
            # Without a journal nobody has the file open; `immutable` makes no files beside it.
            flags = "mode=ro" if journal.exists() else "mode=ro&immutable=1"
            db = _try_open(path, flags)
        except sqlite3.OperationalError as error:
            if not path.exists():
                raise EpisodeError(f"{path}: there is no ledger of the run's episodes") from error
            try:  # with a journal, SQLite creates a file beside it, which fails in a read-only folder
                for source in (path, journal):
                    if source.exists():
                        shutil.copy(source, scratch)
                db = _try_open(Path(scratch) / path.name, "mode=rw")
            except (OSError, sqlite3.Error) as second:
                raise EpisodeError(f"{path}: the ledger of the run's episodes cannot be read ({second})") from second
        except sqlite3.DatabaseError as error:
            raise EpisodeError(f"{path}: not a ledger of a run's episodes, or damaged ({error})") from error
        with closing(db):
            yield db


def _try_open(path: Path, flags: str) -> sqlite3.Connection:
    quoted = str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    db = sqlite3.connect(f"file:{quoted}?{flags}", uri=True, isolation_level=None, timeout=5.0)
    try:
        db.execute("SELECT 1 FROM episodes LIMIT 1").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def _row_of_ledger(row: tuple[Any, ...]) -> tuple[Any, ...]:
    episode, state, reason, began_at, slot, kind, client, policies, turns, begin_body, end_body = row
    begun = bool(slot or kind)
    mode, code_version, attempt, size, reward, success = "", "", 0, 0, None, None
    if begin_body and isinstance(begin := decode_message(begin_body), EpisodeBegin):
        begun, mode, slot, kind, client = True, begin.mode, begin.slot.id, begin.kind, begin.client_id
        code_version, attempt, size = begin.code_version, begin.attempt, begin.group_size
        policies = policies or ",".join(begin.policies)
    if end_body and isinstance(end := decode_message(end_body), EpisodeEnd):
        reward, success = _mean(end.rewards.values()), end.success
    task, group = _split_slot(slot)
    named = _join(policies.split(","))
    return (episode, state, reason, began_at, slot, task, group, kind, client, named, turns, mode, code_version, attempt, size,
            reward, success, begun)  # fmt: skip


def _rows_of_events(lines: bytes) -> Iterator[tuple[Any, ...]]:
    for line in lines.splitlines():
        if b'"name":"episode"' not in line and b'"name":"eval"' not in line:
            continue
        try:
            event = _event.decode(line)
            fields = event.fields
            rewards = fields.get("rewards")
            policies = _join(rewards) if isinstance(rewards, dict) else ""
            if event.name in {"episode", "eval"}:
                success = fields.get("success")
                yield (
                    str(fields["episode_id"]), "eval" if event.name == "eval" else "train", str(fields.get("kind", "")),
                    str(fields.get("client_id", "")), str(fields.get("code_version", "")), str(fields.get("status", "")),
                    str(fields.get("detail", "")), _number(fields.get("reward")), None if success is None else bool(success),
                    _number(fields.get("seconds")), event.at, policies,
                )  # fmt: skip
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
            continue


def _row_of_meta(position: Position, meta: TranscriptMeta) -> tuple[Any, ...]:
    step = max((version for state, version, _ in meta.outcomes.values() if state == "trained"), default=None)
    oldest = meta.versions[0] if meta.versions else None
    staleness = step - 1 - oldest if step is not None and oldest is not None else None
    return (
        meta.episode_id, meta.state, meta.reason, meta.mode, meta.kind, meta.slot, meta.task_id, meta.group_id, meta.attempt,
        meta.group_size, meta.client_id, meta.code_version, _join(meta.policies), meta.status or "expired", meta.detail,
        _mean(meta.rewards.values()), meta.success, meta.turns, meta.sampled_tokens, meta.began_at, meta.ended_at,
        meta.ended_at - meta.began_at, step, staleness, oldest,
        msgspec.json.encode(position).decode() if meta.body_bytes else None,
    )  # fmt: skip


def _row_of_rollout(episode: Rollout, index: BatchIndex) -> tuple[Any, ...]:
    oldest = min(oldest_version(episode), newest_version(episode))
    began_at = min((turn.timings.began_at for turn in episode.turns), default=0.0)
    return (
        episode.episode_id, episode.kind, episode.slot.id, episode.slot.task_id, episode.group_id, episode.attempt,
        episode.group_size, episode.client_id, episode.code_version, _join([episode.policy]), episode.reward, episode.success,
        len(episode.turns), sum(turn.num_sampled for turn in episode.turns), began_at, rollout_s(episode),
        index.version - 1 - oldest, oldest,
    )  # fmt: skip


def _balance(groups: Iterable[tuple[Any, ...]], counts: Counter[str], *, is_read: bool) -> LedgerView:
    live, trained = Counter[str](), 0
    by_reason, evaluated, stray = Counter[str](), Counter[str](), Counter[str]()
    unknown = Counter[str]()
    """The part of `by_reason` that only the ledger knows. These may be evaluation episodes."""
    for fate, reason, mode, state, begun, number in groups:
        if not begun:
            stray[reason or state] += number
        elif fate == "eval" or mode == "eval":
            evaluated[reason or state] += number
        elif fate == "trained":
            trained += number
        elif fate in LIVE:
            live[fate] += number
        else:
            by_reason[reason] += number
            unknown[reason] += number if not mode else 0
    for reason, number in unknown.items():
        surplus = min(by_reason[reason] - counts[f"dropped.{reason}"], number)
        if is_read and surplus > 0 and counts[f"eval_{reason}"] >= evaluated[reason] + surplus:
            by_reason[reason] -= surplus
            evaluated[reason] += surplus
    by_reason = +by_reason
    total = trained + live.total() + by_reason.total()
    counted = {name.removeprefix("dropped."): n for name, n in counts.items() if name.startswith("dropped.") and n}
    return LedgerView(
        begun=counts["begun"] if is_read else total,
        trained=trained,
        open=live["open"],
        waiting=live["waiting"],
        published=live["published"],
        dropped={reason: n for reason, n in by_reason.most_common() if reason not in FAILED},
        failed={reason: n for reason, n in by_reason.most_common() if reason in FAILED},
        evaluated=dict(evaluated.most_common()),
        stray=dict(stray.most_common()),
        is_balanced=is_read
        and total == counts["begun"]
        and trained == counts["trained"]
        and by_reason == Counter(counted),
        explanations={reason: explain(reason) for reason in (*by_reason, *evaluated, *stray) if reason not in LIVE},
    )


def _match_clients(wanted: str, clients: Iterable[str]) -> list[str]:
    """Return the client with this id, else the clients of the invite with this name, else the clients whose ids begin with
    the text."""
    known = list(clients)
    if wanted in known:
        return [wanted]
    named = [client for client in known if client.partition(NAME_SEPARATOR)[0] == wanted]
    return named or [client for client in known if client.startswith(wanted)]


def _conditions(chosen: EpisodeFilter, clients: Sequence[str]) -> tuple[str, list[Any]]:
    """Return the WHERE clause of a filter, and its values. `clients`: ids that match the filter's client. Raises ConfigError
    for an unknown state."""
    clauses, values = ["1"], list[Any]()
    for state in filter(None, chosen.state.split(",")):
        if state not in STATES:
            raise ConfigError(f"state: {state!r} is not one of {', '.join(STATES)}")
    if states := [state for state in chosen.state.split(",") if state]:
        clauses.append(f"fate IN ({','.join('?' * len(states))})")
        values += states
    for column, value in (
        ("reason", chosen.reason), ("kind", chosen.kind), ("task", chosen.task), ("grp", chosen.group), ("code_version", chosen.code_version),
    ):  # fmt: skip
        if value:
            clauses.append(f"{column} = ?")
            values.append(value)
    if chosen.client:
        clauses.append(f"client IN ({','.join('?' * len(clients))})")
        values += clients
    if chosen.mode:
        clauses.append("(mode = ? OR (mode = '' AND (state = 'eval') = ?))")
        values += [chosen.mode, chosen.mode == "eval"]
    if chosen.policy:
        clauses.append("instr(policies, ?)")
        values.append(f",{chosen.policy},")
    if chosen.step is not None:
        clauses.append("(step = ? OR id IN (SELECT episode FROM members WHERE step = ?))")
        values += [chosen.step, chosen.step]
    for operator, bound in (
        (">=", chosen.reward_min), ("<=", chosen.reward_max), (">", chosen.reward_above), ("<", chosen.reward_below),
    ):  # fmt: skip
        if bound is not None:
            clauses.append(f"reward {operator} ?")
            values.append(bound)
    if chosen.text:
        clauses.append("instr(id, ?)")
        values.append(chosen.text)
    return " AND ".join(clauses), values


def _to_row(row: Sequence[Any]) -> EpisodeRow:
    (episode, state, reason, mode, kind, task, slot, group, attempt, client, code_version, reward, success, turns, sampled,
     began_at, seconds, step, staleness, has_transcript) = row[:20]  # fmt: skip
    return EpisodeRow(
        id=episode,
        state=state,
        reason=reason,
        mode=mode,
        kind=kind,
        task=task,
        slot=slot,
        group=group,
        attempt=attempt,
        client=client,
        code_version=code_version,
        reward=reward,
        success=None if success is None else bool(success),
        turns=turns,
        sampled_tokens=sampled,
        began_at=began_at,
        seconds=seconds,
        step=step,
        staleness=staleness,
        has_transcript=bool(has_transcript),
    )


def _histogram(counts: Counter[float], *, bins: int, is_whole: bool) -> Histogram:
    if not counts:
        return Histogram(edges=[], counts=[])
    low, high = min(counts), max(counts)
    if is_whole:
        width = max(1, -(-int(high - low + 1) // bins))
        edges = [low + width * n - 0.5 for n in range(int(high - low) // width + 2)]
    else:
        low, high = (min(low, 0.0), max(high, 1.0)) if low >= 0 and high <= 1 else (low, high)
        high = high if high > low else low + 1.0
        edges = [low + (high - low) * n / bins for n in range(bins + 1)]
    found = [0] * (len(edges) - 1)
    for value, number in counts.items():
        found[min(int((value - edges[0]) / (edges[1] - edges[0])), len(found) - 1)] += number
    return Histogram(edges=edges, counts=found)


def decode_message(body: bytes) -> Message | None:
    """Return a stored message; None if it is damaged."""
    try:
        return _message.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _split_slot(slot: str) -> tuple[str, str]:
    """Return task and group of a slot's id."""
    parts = slot.rsplit("/", 2)
    return (parts[0], f"{parts[0]}/{parts[2]}") if len(parts) == 3 else (slot, slot)


def _join(names: Iterable[str]) -> str:
    """Join names with a comma before and after each, so that one name can be searched for."""
    known = [name for name in names if name]
    return f",{','.join(known)}," if known else ""


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _place_of(folder: Path, raw: str) -> RecordPlace:
    name, offset, size = msgspec.json.decode(raw)
    return RecordPlace(folder / name, offset, size, BatchIndex(record=0, version=0))


def _portions(items: Iterable[tuple[Position, TranscriptMeta]]) -> Iterator[list[tuple[Position, TranscriptMeta]]]:
    iterator = iter(items)
    while portion := list(islice(iterator, PORTION)):
        yield portion


def _encode_cursor(value: float | None, episode: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([value, episode])).decode()


def _decode_cursor(cursor: str) -> tuple[float, str]:
    try:
        value, episode = msgspec.json.decode(base64.urlsafe_b64decode(cursor.encode()), type=tuple[float, str])
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cursor: {cursor[:40]!r} is not a cursor of an earlier page") from error
    return value, episode


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _get(db: sqlite3.Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None


def _set(db: sqlite3.Connection, key: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all writes of the block to the index, or none. Raises ConfigError if the index cannot be written."""
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        raise ConfigError(
            f"the index of the run cannot be written ({error}): free space in {cache_folder()}, or set XDG_CACHE_HOME to another folder"
        ) from error


def _remove_old(folder: Path, *, keep: Path) -> None:
    """Remove the indices that were not opened for a long time; an index can be built again."""
    for path in folder.glob("*.sqlite"):
        try:
            if path != keep and time.time() - path.stat().st_mtime > UNUSED_S:
                _remove(path)
        except OSError:
            continue


def _remove(path: Path) -> None:
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
