"""The collector's persistent state: one SQLite file, one transaction per batch of messages.

`in` is acknowledged after the commit, and the outbox is published after it, so a crash causes a redelivery or a second publish,
and both are deduplicated. Tables: `episodes` (one small row each, kept forever: the ledger), `turns` (large; turns and delivery
reports, deleted when the episode is settled), `slots` (winners), `given_up` (slots of open groups without further attempts),
`groups`, `outcomes` (one row per policy of a forwarded episode), `outbox`, `tickets` (those not used yet), `credit`,
`versions`, `counts`, `meta`, `control` (changes while the run is up), `replies` (to commands), `unsent_control` (learners without the
newest control state), `files` (registries), `eval_tasks` and `eval_slots` (the current evaluation round), `evaluations` (results
that learners' queues do not have yet).

Only one collector may run: its process locks the file, and the error of a second one names the process that holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import reduce
from operator import attrgetter, or_
from pathlib import Path
from tempfile import TemporaryDirectory
from types import GenericAlias
from typing import Any

import msgspec

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.assemble import decode_parts
from swarmq.collector.decide.evals import Evals, EvalSlot, EvalTask
from swarmq.collector.decide.log import LogPosition
from swarmq.collector.decide.state import (
    TAINTS,
    EndedEpisode,
    KindWindow,
    OpenEpisode,
    PublishedGroup,
    Snapshot,
    TurnMeta,
    WaitingMember,
)
from swarmq.errors import CollectorError
from swarmq.messages import Control, DeliveryReport, EpisodeBegin, EpisodeEnd, Message, Slot, Turn
from swarmq.transcripts.writer import ClosedEpisode

STORE_SCHEMA = "2"
BODIES_BYTES = 32 * 1024 * 1024
"""Maximum number of bytes of published episodes that stay in memory to be written as transcripts."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE episodes (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,               -- open, waiting, published, trained, dropped, eval
    reason TEXT NOT NULL DEFAULT '',
    began_at REAL NOT NULL,            -- Unix time, the collector's clock
    tainted INTEGER NOT NULL DEFAULT 0, -- state.TAINTS
    slot TEXT NOT NULL DEFAULT '',
    kind TEXT NOT NULL DEFAULT '',
    client TEXT NOT NULL DEFAULT '',
    policies TEXT NOT NULL DEFAULT '', -- trained policies with turns, separated by commas
    digest BLOB NOT NULL DEFAULT x'',  -- of the end, to recognise duplicates
    calls TEXT NOT NULL DEFAULT '',    -- one per line, to recognise late turns
    ended_at REAL NOT NULL DEFAULT 0,  -- when the end was decided, the collector's clock; 0: open, or by an earlier version
    begin BLOB,
    end BLOB
) WITHOUT ROWID;
CREATE TABLE turns (seq INTEGER PRIMARY KEY, episode TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX turns_of ON turns (episode);
CREATE TABLE slots (id TEXT PRIMARY KEY, episode TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, size INTEGER NOT NULL, state TEXT NOT NULL, since REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE outcomes (
    episode TEXT NOT NULL, policy TEXT NOT NULL, grp TEXT NOT NULL, state TEXT NOT NULL,
    version INTEGER NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (episode, policy)
) WITHOUT ROWID;
CREATE INDEX outcomes_of ON outcomes (grp);
CREATE TABLE outbox (
    seq INTEGER PRIMARY KEY, episode TEXT NOT NULL, policy TEXT NOT NULL, members INTEGER NOT NULL,
    UNIQUE (episode, policy)
);
CREATE TABLE tickets (id TEXT PRIMARY KEY, kind TEXT NOT NULL, sent INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE credit (
    kind TEXT PRIMARY KEY, allocated INTEGER NOT NULL, trained INTEGER NOT NULL, debt REAL NOT NULL,
    due INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE control (one INTEGER PRIMARY KEY CHECK (one = 1), body BLOB NOT NULL);
CREATE TABLE replies (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE unsent_control (policy TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE eval_tasks (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, repeats INTEGER NOT NULL, payload BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE eval_slots (
    id TEXT PRIMARY KEY, slot BLOB NOT NULL, kind TEXT NOT NULL, version INTEGER NOT NULL, began_at REAL NOT NULL,
    sent INTEGER NOT NULL DEFAULT 0, done INTEGER NOT NULL DEFAULT 0, reward REAL, success INTEGER NOT NULL DEFAULT 0,
    given_up INTEGER NOT NULL DEFAULT 0, metrics BLOB
) WITHOUT ROWID;
CREATE TABLE versions (policy TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

GIVEN_UP = """
CREATE TABLE IF NOT EXISTS given_up (
    grp TEXT NOT NULL, slot TEXT NOT NULL, kind TEXT NOT NULL, size INTEGER NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (grp, slot)
) WITHOUT ROWID;
"""
EVAL_GIVEN_UP = "ALTER TABLE eval_slots ADD COLUMN given_up INTEGER NOT NULL DEFAULT 0"
EVAL_METRICS = "ALTER TABLE eval_slots ADD COLUMN metrics BLOB"
EVALUATIONS = """
CREATE TABLE IF NOT EXISTS evaluations (
    policy TEXT NOT NULL, began_at REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (policy, began_at)
) WITHOUT ROWID;
"""
FILES = "CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID"
"""Registries of the run folder, in a run with standby collectors."""
EPISODE_ENDED_AT = "ALTER TABLE episodes ADD COLUMN ended_at REAL NOT NULL DEFAULT 0"
"""Migration of schema-2 stores that an earlier version made without this column."""
UNSENT_CONTROL = "ALTER TABLE telling RENAME TO unsent_control"
"""Migration of stores in which the table has its former name."""
UNUSED_INDEXES = "DROP INDEX IF EXISTS live; DROP INDEX IF EXISTS live_groups;"
"""Migration of stores with indexes that served no query, but cost every change of an episode's state a temporary table."""

PARTS = "SELECT begin, end, began_at, ended_at FROM episodes WHERE id = ?"
TURNS = "SELECT body FROM turns WHERE episode = ? ORDER BY seq"
OUTCOMES = "SELECT policy, state, version, reason FROM outcomes WHERE episode = ?"

PLACEHOLDER = re.compile(r":(\w+)")

SEAL = "UPDATE episodes SET slot = :slot_id, kind = :kind, client = :client_id, digest = :digest, calls = :calls, ended_at = :ended_at"

SQL: dict[type[do.Effect], str] = {
    do.Open: "INSERT INTO episodes (id, state, began_at) VALUES (:episode_id, 'open', :began_at)",
    do.Begin: "INSERT INTO episodes (id, state, began_at, begin) VALUES (:episode_id, 'open', :began_at, :body)",
    do.SaveBegin: "UPDATE episodes SET begin = :body WHERE id = :episode_id",
    do.Taint: "UPDATE episodes SET tainted = :number WHERE id = :episode_id",
    do.SaveTurn: "INSERT INTO turns (episode, body) VALUES (:episode_id, :body)",
    do.SaveEnd: "UPDATE episodes SET end = :body WHERE id = :episode_id",
    do.Seal: f"{SEAL} WHERE id = :episode_id",
    do.Finish: f"{SEAL}, state = 'waiting', policies = :policies, end = :end WHERE id = :episode_id",
    do.Accept: "UPDATE episodes SET state = 'waiting', policies = :policies WHERE id = :episode_id",
    do.Release: "UPDATE episodes SET state = 'published' WHERE id = :episode_id",
    do.Close: "UPDATE episodes SET state = :state, reason = :reason, begin = NULL, end = NULL WHERE id = :episode_id",
    do.ForgetTurns: "DELETE FROM turns WHERE episode = :episode_id",
    do.WinSlot: "INSERT INTO slots VALUES (:slot_id, :episode_id)",
    do.FreeSlot: "DELETE FROM slots WHERE id = :slot_id",
    do.GiveUpSlot: "INSERT INTO given_up VALUES (:group_id, :slot_id, :kind, :size, :at)",
    do.ForgetGivenUp: "DELETE FROM given_up WHERE grp = :group_id",
    do.SaveGroup: "INSERT INTO groups VALUES (:group_id, :kind, :size, :state, :since) "
    "ON CONFLICT (id) DO UPDATE SET state = excluded.state, since = excluded.since",
    do.FreeGroup: "DELETE FROM groups WHERE id = :group_id",
    do.SaveOutcome: "INSERT INTO outcomes VALUES (:episode_id, :policy, :group_id, :state, :version, :reason) ON CONFLICT (episode, policy) "
    "DO UPDATE SET state = excluded.state, version = excluded.version, reason = excluded.reason",
    do.Forward: "INSERT INTO outbox (episode, policy, members) VALUES (:episode_id, :policy, :group_members) ON CONFLICT (episode, policy) DO NOTHING",
    do.ForwardSent: "DELETE FROM outbox WHERE episode = :episode_id AND policy = :policy",
    do.IssueTicket: "INSERT INTO tickets (id, kind) VALUES (:ticket_id, :kind) ON CONFLICT (id) DO UPDATE SET sent = 0",
    do.TicketSent: "UPDATE tickets SET sent = 1 WHERE id = :ticket_id",
    do.TicketUsed: "DELETE FROM tickets WHERE id = :ticket_id",
    do.SaveCredit: "INSERT OR REPLACE INTO credit VALUES (:kind, :allocated, :trained, :debt, :due)",
    do.SaveEvalTask: "INSERT OR REPLACE INTO eval_tasks VALUES (:task_id, :kind, :repeats, :payload)",
    do.IssueEval: "INSERT INTO eval_slots (id, slot, kind, version, began_at) VALUES (:slot_id, :slot, :kind, :version, :began_at) "
    "ON CONFLICT (id) DO UPDATE SET sent = 0",
    do.EvalSent: "UPDATE eval_slots SET sent = 1 WHERE id = :slot_id",
    do.EvalDone: "UPDATE eval_slots SET done = 1, reward = :reward, success = :success, metrics = :metrics WHERE id = :slot_id",
    do.GiveUpEval: "UPDATE eval_slots SET given_up = 1 WHERE id = :slot_id",
    do.CloseRound: "DELETE FROM eval_slots",
    do.SendEvaluation: "INSERT OR REPLACE INTO evaluations VALUES (:policy, :began_at, :body)",
    do.EvaluationSent: "DELETE FROM evaluations WHERE policy = :policy AND began_at = :began_at",
    do.SaveControl: "INSERT OR REPLACE INTO control VALUES (1, :body)",
    do.SaveReply: "INSERT OR REPLACE INTO replies VALUES (:command_id, :body)",
    do.SendControl: "INSERT OR REPLACE INTO unsent_control VALUES (:policy, :number)",
    do.ControlSent: "DELETE FROM unsent_control WHERE policy = :policy AND number <= :number",
    do.SaveFile: "INSERT OR REPLACE INTO files VALUES (:name, :body)",
    do.SaveVersion: "INSERT OR REPLACE INTO versions VALUES (:policy, :version)",
    do.SaveCount: "INSERT OR REPLACE INTO counts VALUES (:name, :value)",
}
"""The statement of every effect that is a row. `:name` stands for the effect's field of that name."""


def _compile(statement: str) -> tuple[str, Callable[[do.Effect], tuple[Any, ...]]]:
    """Return the statement with positional placeholders, which SQLite binds faster, and a function that returns their values."""
    names = PLACEHOLDER.findall(statement)
    sql = PLACEHOLDER.sub("?", statement)
    if len(names) > 1:
        return sql, attrgetter(*names)
    return sql, lambda effect: tuple(getattr(effect, name) for name in names)


STATEMENTS = {effect: _compile(statement) for effect, statement in SQL.items()}

POSITION = "log"
"""Key in `meta` of the store's position in the log of a run with standby collectors."""

_rows: msgspec.msgpack.Decoder[list[do.Effect]] = msgspec.msgpack.Decoder(GenericAlias(list, (reduce(or_, SQL),)))


def encode_rows(effects: Iterable[do.Effect]) -> bytes:
    """Encode the effects that are rows, for `Store.apply`; b"" if there are none."""
    rows = [effect for effect in effects if type(effect) in SQL]
    return msgspec.msgpack.encode(rows) if rows else b""


def decode_rows(body: bytes) -> list[do.Effect]:
    """Decode a transaction. Raises CollectorError if another version of swarmq encoded it."""
    try:
        return _rows.decode(body)
    except msgspec.MsgspecError as error:
        raise CollectorError(
            f"a transaction in the log cannot be read ({error}): all collectors of a run need the same version of swarmq"
        ) from error


_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
"""Decoder for message bodies that were checked on arrival."""


class Bodies:
    """The encoded messages of one episode."""

    __slots__ = ("row", "size", "turns")

    def __init__(self, row: tuple[Any, ...], turns: list[bytes]) -> None:
        self.row = row
        """(begin, end or None, Unix time of the begin, Unix time of the end)"""
        self.turns = turns
        self.size = len(row[0]) + len(row[1] or b"") + sum(map(len, turns))


class RecentBodies:
    """The messages of the newest published episodes, at most `max_bytes` of them, so that they are not read again when the
    episodes are settled."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._episodes: dict[str, Bodies] = {}

    def add(self, episode_id: str, bodies: Bodies) -> None:
        self.pop(episode_id)
        self._episodes[episode_id] = bodies
        self._size += bodies.size
        while self._size > self._max_bytes:
            self._size -= self._episodes.pop(next(iter(self._episodes))).size

    def pop(self, episode_id: str) -> Bodies | None:
        bodies = self._episodes.pop(episode_id, None)
        if bodies is not None:
            self._size -= bodies.size
        return bodies


class Store:
    """An open store. All methods raise CollectorError if SQLite fails."""

    def __init__(self, path: Path | None, *, run: str) -> None:
        """Open or create the file; None keeps everything in memory, for simulations."""
        self.keeps_bodies = False
        """Whether `parts` keeps the messages that it reads, for a later call of `closed`."""
        self._bodies = RecentBodies(BODIES_BYTES)
        self._unwritten: list[do.SaveTurn] = []
        """Turns of the present transaction that SQLite does not have yet; in a transaction, only `closed` reads turns."""
        self._lock = _lock(path) if path else None
        self._where = str(path or ":memory:")
        self._folder = path.parent if path else None
        try:
            with self._mapped():
                self._db = sqlite3.connect(self._where, isolation_level=None)
                self._cursor = self._db.cursor()  # a new one for every short statement would cost time
                for pragma in ("page_size=16384", "journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=2000"):
                    self._db.execute(f"PRAGMA {pragma}")
                self._prepare(run)
        except CollectorError:
            self.close()
            raise

    def close(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything written inside the block durably, or nothing of it."""
        with self._mapped():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._write_turns()
                self._db.execute("COMMIT")
            except BaseException:
                self._unwritten.clear()
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def write(self, effect: do.Effect) -> None:
        """Execute an effect that is a row; other effects are left to the service. Turns are written together, because no decision reads
        them."""
        if type(effect) is do.SaveTurn:
            assert self._db.in_transaction
            self._unwritten.append(effect)
            return
        if type(effect) is do.ForgetTurns:
            self._write_turns()
        if statement := STATEMENTS.get(type(effect)):
            sql, fields = statement
            self._cursor.execute(sql, fields(effect))

    def _write_turns(self) -> None:
        sql, fields = STATEMENTS[do.SaveTurn]
        self._cursor.executemany(sql, map(fields, self._unwritten))
        self._unwritten.clear()

    # ----------------------------------------------------------------------------------------- the log

    def is_empty(self) -> bool:
        """Return whether the store has no history."""
        with self._mapped():
            return not any(self._one("SELECT EXISTS (SELECT 1 FROM episodes), EXISTS (SELECT 1 FROM credit)") or ())

    def position(self) -> LogPosition:
        """Return the position in the log up to which the store contains all valid transactions."""
        with self._mapped():
            row = self._one("SELECT value FROM meta WHERE key = ?", POSITION)
        return msgspec.json.decode(row[0], type=LogPosition) if row else LogPosition()

    def save_position(self, position: LogPosition) -> None:
        """Write the position in the log, as a part of the present transaction."""
        self._db.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", (POSITION, msgspec.json.encode(position).decode())
        )

    def leave_log(self) -> None:
        """Delete the position in the log: the store goes on without standbys."""
        with self.transaction():
            self._db.execute("DELETE FROM meta WHERE key = ?", (POSITION,))

    def file(self, name: str) -> bytes:
        """Return the stored content of a registry; b"" if there is none."""
        with self._mapped():
            row = self._one("SELECT body FROM files WHERE name = ?", name)
        return row[0] if row else b""

    def dump(self) -> bytes:
        """Return the whole store as an SQLite file."""
        with self._mapped(), TemporaryDirectory(dir=self._folder) as folder:
            with closing(sqlite3.connect(f"{folder}/copy")) as copy:
                self._db.backup(copy)
            return Path(folder, "copy").read_bytes()

    def replace(self, dumped: bytes) -> None:
        """Replace the content by that of another store, as `dump` returns it."""
        with self._mapped(), TemporaryDirectory(dir=self._folder) as folder:
            Path(folder, "copy").write_bytes(dumped)
            with closing(sqlite3.connect(f"{folder}/copy")) as copy:
                copy.backup(self._db)

    # ---------------------------------------------------------------------------------------- the past

    def ended(self, episode_id: str) -> EndedEpisode | None:
        row = self._one(
            "SELECT state, reason, digest, calls FROM episodes WHERE id = ? AND state != 'open'", episode_id
        )
        return EndedEpisode(row[0], row[1], row[2], frozenset(row[3].split("\n"))) if row else None

    def winner(self, slot_id: str) -> str | None:
        row = self._one("SELECT episode FROM slots WHERE id = ?", slot_id)
        return row[0] if row else None

    def group_closed(self, group_id: str) -> bool:
        return self._one("SELECT 1 FROM groups WHERE id = ? AND state != 'open'", group_id) is not None

    def reply(self, command_id: str) -> dict[str, Any] | None:
        row = self._one("SELECT body FROM replies WHERE id = ?", command_id)
        return msgspec.msgpack.decode(row[0]) if row else None

    # ----------------------------------------------------------------------------------------- reading

    def snapshot(self) -> Snapshot:
        """Return everything that a core keeps in memory."""
        with self._mapped():
            return Snapshot(
                episodes=self._open_episodes(),
                groups={
                    row[0]: row[1:] for row in self._all("SELECT id, kind, size, since FROM groups WHERE state='open'")
                },
                waiting=self._waiting(),
                given_up=self._all("SELECT grp, slot, kind, size, at FROM given_up ORDER BY grp, slot"),
                published=self._published(),
                tickets=dict(self._all("SELECT id, kind FROM tickets")),
                credit={
                    kind: KindWindow(allocated=allocated, trained=trained, debt=debt, due=due)
                    for kind, allocated, trained, debt, due in self._all("SELECT * FROM credit")
                },
                versions=dict(self._all("SELECT * FROM versions")),
                counts=dict(self._all("SELECT * FROM counts")),
                control=self._control(),
                evals=self._evals(),
            )

    def outbox(self) -> list[do.Effect]:
        """Return the effects whose publication is not confirmed yet: tickets first, then rollouts in their order."""
        with self._mapped():
            tickets = self._all("SELECT id, kind FROM tickets WHERE NOT sent")
            episodes = self._all("SELECT episode, policy, members FROM outbox ORDER BY seq")
            control = self._all("SELECT policy, number FROM unsent_control")
            evals = self._all("SELECT id, slot, kind, version, began_at FROM eval_slots WHERE NOT sent")
            evaluations = self._all("SELECT policy, began_at, body FROM evaluations ORDER BY began_at, policy")
        return [
            *(do.IssueTicket(*row) for row in tickets),
            *(do.SendControl(*row) for row in control),
            *(do.IssueEval(*row) for row in evals),
            *(do.SendEvaluation(*row) for row in evaluations),
            *(do.Forward(*row) for row in episodes),
        ]

    def control(self) -> Control | None:
        """Return the stored control state, or None."""
        with self._mapped():
            return self._control()

    def parts(self, episode_id: str) -> tuple[EpisodeBegin, EpisodeEnd, list[Turn]] | None:
        """Return a forwarded episode's begin, end and turns (in order of arrival), or None once a learner has reported on it."""
        bodies = self.bodies(episode_id)
        return decode_parts(bodies.row[0], bodies.row[1], bodies.turns) if bodies else None

    def bodies(self, episode_id: str) -> Bodies | None:
        """Return a forwarded episode's messages as they arrived, or None once a learner has reported on it."""
        with self._mapped():
            row = self._one(f"{PARTS} AND state = 'published'", episode_id)
            if row is None:
                return None
            bodies = Bodies(row, [body for (body,) in self._db.execute(TURNS, (episode_id,))])
        if self.keeps_bodies:
            self._bodies.add(episode_id, bodies)
        return bodies

    def closed(self, close: do.Close, now: float) -> ClosedEpisode | None:
        """Return an episode that this effect is about to settle, with its messages as they arrived; None if it has no begin."""
        known = self._bodies.pop(close.episode_id)
        if known is None:
            self._write_turns()
            row = self._db.execute(PARTS, (close.episode_id,)).fetchone()
            if row[0] is None:
                return None
            known = Bodies(row, [body for (body,) in self._db.execute(TURNS, (close.episode_id,))])
        begin, end, began_at, ended_at = known.row
        outcomes: Sequence[tuple[str, str, int, str]] = close.outcomes
        if end is not None and not outcomes:
            outcomes = self._db.execute(OUTCOMES, (close.episode_id,)).fetchall()
        return ClosedEpisode(
            episode_id=close.episode_id,
            state=close.state,
            reason=close.reason,
            began_at=began_at,
            ended_at=ended_at,
            closed_at=max(now, ended_at),
            begin=begin,
            end=close.end or end,
            turns=known.turns,
            outcomes=outcomes,
            size=known.size + len(close.end),
        )

    def payload(self, task_id: str) -> bytes | None:
        """Return the payload of an evaluation task, or None if the task is gone."""
        with self._mapped():
            row = self._one("SELECT payload FROM eval_tasks WHERE id = ?", task_id)
        return row[0] if row else None

    def _evals(self) -> Evals:
        tasks = self._all("SELECT id, kind, repeats FROM eval_tasks ORDER BY id")
        slots = self._all(
            "SELECT slot, kind, version, began_at, reward, success, metrics, done, given_up FROM eval_slots ORDER BY id"
        )
        return Evals(
            [EvalTask(task_id=task_id, kind=kind, repeats=repeats) for task_id, kind, repeats in tasks],
            [
                EvalSlot(
                    slot=msgspec.msgpack.decode(slot, type=Slot),
                    kind=kind,
                    version=version,
                    began_at=began_at,
                    reward=reward,
                    success=bool(success),
                    metrics=msgspec.msgpack.decode(metrics, type=dict[str, float]) if metrics else {},
                    done=bool(done),
                    given_up=bool(given_up),
                )
                for slot, kind, version, began_at, reward, success, metrics, done, given_up in slots
            ],
        )

    def _control(self) -> Control | None:
        row = self._one("SELECT body FROM control")
        return msgspec.msgpack.decode(row[0], type=Control) if row else None

    def _open_episodes(self) -> list[OpenEpisode]:
        episodes = []
        for episode_id, began_at, tainted, begin, end in self._all(
            "SELECT id, began_at, tainted, begin, end FROM episodes WHERE state = 'open' ORDER BY began_at, id"
        ):
            episode = OpenEpisode(
                episode_id=episode_id, began_at=began_at, last_message_at=began_at, taint=TAINTS[tainted]
            )
            if begin and isinstance(message := _messages.decode(begin), EpisodeBegin):
                episode.begin = message
            if end and isinstance(message := _messages.decode(end), EpisodeEnd):
                episode.end, episode.end_body = message, end
            for (body,) in self._db.execute("SELECT body FROM turns WHERE episode = ? ORDER BY seq", (episode_id,)):
                match _messages.decode(body):
                    case Turn() as turn:
                        episode.calls[turn.call_id] = TurnMeta.of(turn, len(body))
                    case DeliveryReport() as report:
                        episode.take_report(report)
            episodes.append(episode)
        return episodes

    def _waiting(self) -> dict[str, list[WaitingMember]]:
        waiting: dict[str, list[WaitingMember]] = {}
        for episode_id, slot_id, policies, begin in self._all(
            "SELECT id, slot, policies, begin FROM episodes WHERE state = 'waiting' ORDER BY began_at, id"
        ):
            if isinstance(message := _messages.decode(begin), EpisodeBegin):
                member = WaitingMember(episode_id, slot_id, tuple(policies.split(",")))
                waiting.setdefault(message.slot.group_id, []).append(member)
        return waiting

    def _published(self) -> dict[str, PublishedGroup]:
        groups = {
            group_id: PublishedGroup(kind=kind, size=size, pending={}, members={}, trained=set())
            for group_id, kind, size in self._all("SELECT id, kind, size FROM groups WHERE state = 'published'")
        }
        for group_id, episode_id, policy, state in self._all(
            "SELECT grp, episode, policy, o.state FROM outcomes o JOIN groups g ON g.id = o.grp WHERE g.state = 'published'"
        ):
            members = groups[group_id].members
            members[policy] = members.get(policy, 0) + 1
            if state == "pending":
                groups[group_id].pending.setdefault(policy, set()).add(episode_id)
            elif state == "trained":
                groups[group_id].trained.add(episode_id)
        return groups

    # ----------------------------------------------------------------------------------------- helpers

    def _one(self, statement: str, *parameters: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._cursor.execute(statement, parameters).fetchone()
        return row

    def _all(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._db.execute(statement, parameters).fetchall()

    def _prepare(self, run: str) -> None:
        """Create the tables of a new file, or check an existing one. Raises CollectorError for a file of another run or
        schema."""
        if self._one("SELECT 1 FROM sqlite_master LIMIT 1") is None:
            self._db.executescript(f"BEGIN; {TABLES} {GIVEN_UP} {EVALUATIONS} COMMIT;")
            with self.transaction():
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", [("schema", STORE_SCHEMA), ("run", run)])
        try:
            meta = dict(self._all("SELECT key, value FROM meta"))
        except sqlite3.OperationalError:
            meta = {}
        if "run" not in meta:
            raise CollectorError(f"{self._where}: not a collector's store; move it away")
        if meta["schema"] != STORE_SCHEMA:
            raise CollectorError(
                f"{self._where}: written with store schema {meta['schema']}, this swarmq reads {STORE_SCHEMA}: "
                "use the version that wrote it, or another run folder"
            )
        if meta["run"] != run:
            raise CollectorError(f"{self._where}: belongs to run {meta['run']!r}, not {run!r}; use another run folder")
        self._db.execute(GIVEN_UP)
        if self._one("SELECT 1 FROM pragma_table_info('eval_slots') WHERE name = 'given_up'") is None:
            self._db.execute(EVAL_GIVEN_UP)
        self._db.execute(EVALUATIONS)
        self._db.execute(FILES)
        if self._one("SELECT 1 FROM pragma_table_info('eval_slots') WHERE name = 'metrics'") is None:
            self._db.execute(EVAL_METRICS)
        if self._one("SELECT 1 FROM pragma_table_info('episodes') WHERE name = 'ended_at'") is None:
            self._db.execute(EPISODE_ENDED_AT)
        if self._one("SELECT 1 FROM sqlite_master WHERE name = 'telling'"):
            self._db.execute(UNSENT_CONTROL)
        self._db.executescript(UNUSED_INDEXES)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise CollectorError(f"{self._where}: {error}; check the disk's space and the file's rights") from error


def _lock(path: Path) -> int:
    """Lock `<path>.lock` while the store is open. Raises CollectorError that names the process holding it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(handle, 32).decode(errors="replace").strip()
        os.close(handle)
        raise CollectorError(f"{path}: in use by the collector with pid {holder}; stop that one first") from error
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle
