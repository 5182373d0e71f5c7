"""The order of transactions of a run with standby collectors: a log in which every collector reads the same history. Pure.

  leader   ──Transaction──┐                                   ┌──> leader: it is valid, so commit, acknowledge and publish
  standby  ──Claim, Join──┼──> log, in one order for everybody ┤
  leader   ──Copy─────────┘                                   └──> standby: apply it

Any collector may append at any time. Which entries are valid follows from their order alone, so that all readers agree:

* A claim is valid if its term is higher than that of every claim before it. Its sender then leads.
* A transaction is valid if its term is that of the newest valid claim and its number is the next one.

A leader therefore knows that a transaction is valid only when it reads it back. A former leader that was paused or cut off appends
too late: its transaction follows the claim of its successor, so no reader takes it as valid, nor does the former leader itself.

A collector that lacks a part of the history (a new one, or one that was away for longer than the log reaches back) joins: it
requests a copy of the leader's whole store, and applies the transactions after it. It cannot lead before that.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from swarmq.messages import LogEntry


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Position in the log: a store contains all valid transactions up to it."""

    log: str = ""
    """Id of the log, chosen by the first leader; empty: the store does not come from a log."""
    term: int = 0
    """Term of the newest valid claim."""
    number: int = 0
    """Number of the newest valid transaction."""
    offset: int = -1
    """Offset in the stream of the newest entry that was read."""
    led: bool = False
    """Whether this store's collector made the newest valid claim."""


class ReadResult(Enum):
    """What a collector must do after reading an entry."""

    NOTHING = "nothing"
    APPLY = "apply"
    """Apply a transaction of the leader; its bytes are in `LogReader.body`."""
    CONFIRMED = "confirmed"
    """Commit the transaction that this leader has appended: it is valid."""
    WON = "won"
    """Lead: this collector's claim is valid, and its store has the whole history."""
    LOST = "lost"
    """Stop leading, because another collector's claim is valid. A standby goes on reading."""
    JOIN_REQUESTED = "join_requested"
    """Append a copy of the store, because a standby has requested one."""
    REPLACE = "replace"
    """Replace the store by the copy that this collector has requested; its bytes are in `LogReader.body`."""
    GAP = "gap"
    """Request a copy of the leader's store, because history is missing."""
    FOREIGN = "foreign"
    """Give up: the store does not belong to this log."""


class LogReader:
    """State of one collector that reads the log entry by entry, in order."""

    def __init__(self, me: str, position: LogPosition, *, is_empty: bool) -> None:
        """`me`: id of this process. `is_empty`: whether the store has no history of its own."""
        self.me = me
        self.position = position
        self.is_leading = False
        self.is_complete = bool(position.log)
        """Whether the store contains all valid transactions up to `position`, so that this collector may lead."""
        self.has_begun = bool(position.log)
        """Whether the log has an entry of a leader. If not, the first claim founds the log, and the history begins with
        the store of its sender."""
        self.join = ""
        """Id of this collector's unanswered request for a copy of the store, or "". The collector sends a new request after every GAP."""
        self._num_joins = 0
        self.body = b""
        self._is_empty = is_empty
        self._parts: list[bytes] = []
        self._part_of: tuple[object, ...] = ()

    def read(self, entry: LogEntry, offset: int) -> ReadResult:
        """Read the entry at `offset` of the stream, and return what to do. Entries that are delivered again are ignored."""
        if offset <= self.position.offset:
            return ReadResult.NOTHING
        self.has_begun |= offset > 0 and self.position.offset < 0  # the beginning is deleted already
        result = self._read(entry, offset)
        self.position = msgspec.structs.replace(self.position, offset=offset)
        return result

    def skip(self, offset: int) -> None:
        """Skip the entry at `offset`, which does not belong to this run or cannot be decoded."""
        self.position = msgspec.structs.replace(self.position, offset=max(offset, self.position.offset))

    def _read(self, entry: LogEntry, offset: int) -> ReadResult:
        if (self.is_complete or self.join) and offset > self.position.offset + 1:
            return self._miss()  # even if this entry is irrelevant: a claim may be among the deleted ones
        if entry.what == "join":
            return ReadResult.JOIN_REQUESTED if self.is_leading else ReadResult.NOTHING
        if not self.position.log and not self.join:
            return self._read_first(entry)
        if self.position.log and entry.log != self.position.log:
            # A claim of another log came too late to found this one.
            return ReadResult.NOTHING if entry.what == "claim" else ReadResult.FOREIGN
        if entry.what == "claim":
            return self._read_claim(entry)
        if entry.term < self.position.term:
            return ReadResult.NOTHING
        if entry.what == "copy":
            return self._read_copy(entry)
        if entry.term > self.position.term:  # the claim of this term is deleted: request a copy from its leader
            self.position = msgspec.structs.replace(self.position, term=entry.term)
            return self._miss()
        return self._read_transaction(entry) if self.is_complete else ReadResult.NOTHING

    def _read_first(self, entry: LogEntry) -> ReadResult:
        """Return WON if this collector's claim founds the log, else GAP or FOREIGN."""
        is_founder = not self.has_begun and entry.what == "claim" and entry.sender == self.me
        self.has_begun = True
        if is_founder:
            self.position = LogPosition(log=entry.log, term=entry.term, led=True)
            self.is_complete = self.is_leading = True
            return ReadResult.WON
        self.position = msgspec.structs.replace(self.position, term=entry.term)
        return self._miss() if self._is_empty else ReadResult.FOREIGN

    def _read_claim(self, entry: LogEntry) -> ReadResult:
        if entry.term <= self.position.term:
            return ReadResult.NOTHING
        was_complete = self.is_complete
        self.is_leading = was_complete and entry.sender == self.me
        self.position = msgspec.structs.replace(self.position, term=entry.term, led=self.is_leading)
        self._parts, self._part_of = [], ()
        if self.is_leading:
            return ReadResult.WON
        return ReadResult.LOST if was_complete else self._miss()  # request a copy from the new leader

    def _read_transaction(self, entry: LogEntry) -> ReadResult:
        number = self.position.number
        if entry.number <= number:
            return ReadResult.NOTHING  # published twice, because the first confirm was lost
        if entry.number > number + 1:
            return self._miss()
        if not self._complete((entry.term, entry.number), entry):
            return ReadResult.NOTHING
        self.position = msgspec.structs.replace(self.position, number=entry.number)
        return ReadResult.CONFIRMED if self.is_leading else ReadResult.APPLY

    def _read_copy(self, entry: LogEntry) -> ReadResult:
        if entry.join != self.join or not self.join or not self._complete((entry.term, entry.join), entry):
            return ReadResult.NOTHING
        self.position = LogPosition(log=entry.log, term=entry.term, number=entry.number)
        self.is_complete, self.join = True, ""
        return ReadResult.REPLACE

    def _complete(self, of: tuple[object, ...], entry: LogEntry) -> bool:
        """Add an entry's part to the body that `of` identifies, and return whether the body is complete."""
        if self._part_of != of:
            self._parts, self._part_of = [], of
        if entry.part == len(self._parts):  # other parts were published twice
            self._parts.append(entry.body)
        if len(self._parts) < entry.num_parts:
            return False
        self.body = b"".join(self._parts)
        self._parts, self._part_of = [], ()
        return True

    def _miss(self) -> ReadResult:
        self.is_complete = self.is_leading = False
        self._num_joins += 1
        self.join = f"{self.me}.{self._num_joins}"
        self._parts, self._part_of = [], ()
        return ReadResult.GAP
