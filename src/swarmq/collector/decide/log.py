"""The order of transactions of a run with standby collectors: a log in which every collector reads the same history. Pure.

  leader   ──Transaction──┐                                   ┌──> leader: it counts, so commit, acknowledge and publish
  standby  ──Claim, Join──┼──> log, in one order for everybody ┤
  leader   ──Base─────────┘                                   └──> standby: apply it

Anybody may append at any time; what counts follows from the order alone, so that all readers agree:

* A claim counts if its term is higher than that of every claim before it. Its sender leads from there on.
* A transaction counts if its term is that of the newest claim and its number is the next one.

A leader therefore knows that a transaction counts only when it reads it back. A former leader that was paused, or cut off, appends
too late: its transaction lies behind the claim of its successor and counts for nobody, itself included.

A collector that lacks a part of the history (a new one, or one that was away for longer than the log reaches back) joins: it asks
for a base, which is the leader's whole store, and applies the transactions behind it. It cannot lead before.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from swarmq.messages import LogEntry


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The place in the log up to which a store has its history."""

    log: str = ""
    """Id of the log, chosen by the first leader; empty: the store does not come from a log."""
    term: int = 0
    """Term of the newest claim that counts."""
    number: int = 0
    """Number of the newest transaction that counts."""
    offset: int = -1
    """Offset in the stream of the newest entry that was read."""
    led: bool = False
    """Whether the newest claim that counts is of this store's collector."""


class ReadResult(Enum):
    """What an entry means to the collector that reads it."""

    NOTHING = "nothing"
    APPLY = "apply"
    """A transaction to apply: its bytes are in `LogReader.body`."""
    CONFIRMED = "confirmed"
    """The transaction that this leader has appended counts."""
    WON = "won"
    """This collector's claim counts: it has the whole history and leads."""
    LOST = "lost"
    """Another collector leads from here on."""
    JOIN_REQUESTED = "join_requested"
    """A standby asks this leader for a base."""
    REBASE = "rebase"
    """The base that this collector has asked for is complete: its bytes are in `LogReader.body`."""
    GAP = "gap"
    """History is missing: ask for a base."""
    FOREIGN = "foreign"
    """The store does not belong to this log."""


class LogReader:
    """One collector's reading of the log, entry by entry and in order."""

    def __init__(self, me: str, position: LogPosition, *, is_empty: bool) -> None:
        """`me`: id of this process. `is_empty`: whether the store has no history of its own."""
        self.me = me
        self.position = position
        self.is_leading = False
        self.is_complete = bool(position.log)
        """Whether the store has everything that counts up to `position`, so that this collector may lead."""
        self.has_begun = bool(position.log)
        """Whether the log has a leader's entry. If not, the first claim founds it, with the claimer's store as its first base."""
        self.join = ""
        """Id of the request for a base that is open. A new one is to be sent after every GAP."""
        self._num_joins = 0
        self.body = b""
        self._is_empty = is_empty
        self._parts: list[bytes] = []
        self._part_of: tuple[object, ...] = ()

    def read(self, entry: LogEntry, offset: int) -> ReadResult:
        """Take the next entry, and return what follows from it. Entries that are delivered again are ignored."""
        if offset <= self.position.offset:
            return ReadResult.NOTHING
        self.has_begun |= offset > 0 and self.position.offset < 0  # the beginning is deleted already
        result = self._read(entry, offset)
        self.position = msgspec.structs.replace(self.position, offset=offset)
        return result

    def skip(self, offset: int) -> None:
        """Pass over an entry that is none of this run's."""
        self.position = msgspec.structs.replace(self.position, offset=max(offset, self.position.offset))

    def _read(self, entry: LogEntry, offset: int) -> ReadResult:
        if (self.is_complete or self.join) and offset > self.position.offset + 1:
            return self._miss()  # also where this entry says nothing: a claim may be among those that are deleted
        if entry.what == "join":
            return ReadResult.JOIN_REQUESTED if self.is_leading else ReadResult.NOTHING
        if not self.position.log and not self.join:
            return self._read_first(entry)
        if self.position.log and entry.log != self.position.log:
            return (
                ReadResult.NOTHING if entry.what == "claim" else ReadResult.FOREIGN
            )  # a claim to found the log came too late
        if entry.what == "claim":
            return self._read_claim(entry)
        if entry.term < self.position.term:
            return ReadResult.NOTHING
        if entry.what == "base":
            return self._read_base(entry)
        if entry.term > self.position.term:  # its claim is deleted: ask the leader that it made
            self.position = msgspec.structs.replace(self.position, term=entry.term)
            return self._miss()
        return self._read_transaction(entry) if self.is_complete else ReadResult.NOTHING

    def _read_first(self, entry: LogEntry) -> ReadResult:
        """Found the log, or learn that others have."""
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
        return ReadResult.LOST if was_complete else self._miss()  # ask the new leader

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

    def _read_base(self, entry: LogEntry) -> ReadResult:
        if entry.join != self.join or not self.join or not self._complete((entry.term, entry.join), entry):
            return ReadResult.NOTHING
        self.position = LogPosition(log=entry.log, term=entry.term, number=entry.number)
        self.is_complete, self.join = True, ""
        return ReadResult.REBASE

    def _complete(self, of: tuple[object, ...], entry: LogEntry) -> bool:
        """Collect a part, and return whether it was the last one that lacked."""
        if self._part_of != of:
            self._parts, self._part_of = [], of
        if entry.part == len(self._parts):  # others were published twice
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
