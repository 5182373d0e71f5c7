"""Detects ranks that died or lost their host, and ends this rank with a message that names them.

Collectives alone would detect them late, or never: ranks may wait days for rank 0's next command, and a host that loses its network
closes no connection. So a thread of every rank counts heartbeats in the store. Rank 0 watches all ranks, the others watch rank 0. A
rank that ends with an error writes the reason to the store for the others.

  beat/<rank>   number of heartbeats     end   the first reason to end     left/<rank>   set when the rank ends
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import msgspec
import structlog

from swarmq.errors import SwarmqError
from swarmq.runtime.processes import FINAL_MESSAGE_PREFIX, exit_status_for
from swarmq.runtime.terminal import visible

log = structlog.get_logger()

Store = Any
"""torch.distributed.TCPStore, of which type checkers know nothing."""
BEAT_S = 1.0
LOST_S = 600.0
"""Seconds without a heartbeat after which a rank is lost. Loading or writing a large model can stop a process's threads for minutes."""
SUSPECT_S = 5.0
"""Seconds without a heartbeat after which a rank is lost, once a collective has failed."""
LEAVE_S = 10.0
"""Seconds that a rank has to end by itself after another rank has ended. Also the maximum seconds that rank 0 waits for the others
at the end, because it may serve the store."""
BEAT, END, LEFT = "beat", "end", "left"


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a rank that the other ranks compare and name in messages."""

    rank: int
    host: str
    pid: int
    versions: dict[str, str] = {}
    nccl: str = ""
    """Version of NCCL; empty without a GPU."""
    settings: dict[str, Any] | None = None
    """Settings of the policy in the job file of the rank's host; None without a job file."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Reason for which all ranks end."""

    text: str
    status: int
    rank: int
    """Rank that detected the reason."""


def end_process(end: End) -> None:
    """End this process at once, with the reason as its last line of output and `end.status` as exit status."""
    sys.stderr.write(visible(f"{FINAL_MESSAGE_PREFIX}{end.text}") + "\n")
    sys.stderr.flush()
    os._exit(end.status)


class RankMonitor:
    """One rank's monitor of the learner's ranks. `store`: a connection that nothing else uses."""

    current: ClassVar[RankMonitor | None] = None
    """The monitor of this process, if the learner has several ranks."""

    def __init__(
        self,
        store: Store,
        facts: Sequence[RankFacts],
        rank: int,
        *,
        address: str,
        beat_s: float = BEAT_S,
        lost_s: float = LOST_S,
        suspect_s: float = SUSPECT_S,
        leave_s: float = LEAVE_S,
        end_process: Callable[[End], None] = end_process,
    ) -> None:
        self._store, self._facts, self._rank, self._address = store, facts, rank, address
        self._beat_s, self._lost_s, self._suspect_s, self._leave_s = beat_s, lost_s, suspect_s, leave_s
        self._others = [each for each in range(len(facts)) if each != rank and 0 in (rank, each)]
        """Ranks that this rank watches."""
        self._beats = _Beats()
        self._finish = end_process
        self._closing = threading.Event()
        self._answered = time.monotonic()
        store.set(f"{BEAT}/{rank}", "0")
        for run in (self._watch, self._watch_store):
            threading.Thread(target=run, name=f"rank monitor {run.__name__}", daemon=True).start()

    @property
    def own(self) -> RankFacts:
        return self._facts[self._rank]

    def close(self) -> None:
        """Stop monitoring, because this rank has finished its work. Rank 0 waits for the others first, because it may serve the store."""
        self._closing.set()
        self._leave()

    @contextlib.contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error inside the block to the other ranks, and end this process at once: with a broken process group,
        Python's own exit may wait forever."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, SwarmqError):
                traceback.print_exc()
            end = self._end(f"{self.own}: {error}", exit_status_for([error]))
            self._closing.set()
            self._end_process(end)

    def find_lost(self) -> str:
        """Return a text that names the lost ranks, or "" if all are alive, after a collective has failed. Takes `suspect_s` seconds if
        all are alive."""
        everyone = [each for each in range(len(self._facts)) if each != self._rank]
        beats = _Beats()
        try:
            beats.find_silent(self._read(everyone), self._suspect_s)
            until, is_over = time.monotonic() + self._suspect_s, False
            while not is_over:
                time.sleep(self._beat_s)
                is_over = time.monotonic() > until  # read the heartbeats once more after this time
                if end := self._read_end():
                    return end.text
                if lost := beats.find_silent(self._read(everyone), self._suspect_s):
                    return self._describe(lost, self._suspect_s)
        except RuntimeError as error:
            return self._store_is_gone(error)
        return ""

    def _watch(self) -> None:
        beats = 0
        while not self._closing.wait(self._beat_s):
            beats += 1
            try:
                self._store.set(f"{BEAT}/{self._rank}", str(beats))
                lost = self._beats.find_silent(self._read(self._others), self._lost_s)
                end = self._read_end()
            except RuntimeError as error:
                self._exit(End(text=self._store_is_gone(error), status=1, rank=self._rank))
                return
            self._answered = time.monotonic()
            if lost and not end:
                end = self._end(self._describe(lost, self._lost_s), 1)
            if end:
                self._exit(end)
                return

    def _watch_store(self) -> None:
        """End this rank if the store stops answering, because the store's host may have failed without closing the connection."""
        while not self._closing.wait(self._beat_s):
            if time.monotonic() - self._answered > self._lost_s:
                self._finish(End(text=f"{self.own} ends: {self._store_is_gone(None)}", status=1, rank=self._rank))
                return

    def _read(self, ranks: Collection[int]) -> dict[int, bytes]:
        """Return rank -> present heartbeat of those of `ranks` that have not left."""
        there = [
            each
            for each in ranks
            if not self._store.check([f"{LEFT}/{each}"]) and self._store.check([f"{BEAT}/{each}"])
        ]
        return (
            dict(zip(there, self._store.multi_get([f"{BEAT}/{each}" for each in there]), strict=True)) if there else {}
        )

    def _read_end(self) -> End | None:
        return msgspec.json.decode(self._store.get(END), type=End) if self._store.check([END]) else None

    def _end(self, text: str, status: int) -> End:
        """Write a reason to the store, unless the store has one already, and return the reason in the store."""
        own = End(text=text, status=status, rank=self._rank)
        try:
            return msgspec.json.decode(self._store.compare_set(END, "", msgspec.json.encode(own).decode()), type=End)
        except RuntimeError:
            return own

    def _leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{LEFT}/{self._rank}", "")
            if self._rank == 0:
                wait_for_ranks(self._store, LEFT, range(1, len(self._facts)), self._leave_s)

    def _describe(self, ranks: Iterable[int], silent_s: float) -> str:
        named = ", ".join(str(self._facts[each]) for each in ranks)
        return (
            f"no sign of life for {silent_s:g} s of {named}: it died, or its host or network failed; see its log. Nothing is lost: the "
            "next start of all ranks resumes from the newest checkpoint and the batch log"
        )

    def _store_is_gone(self, error: Exception | None) -> str:
        why = f" ({next(iter(str(error).splitlines()), '')})" if error else ""
        return (
            f"no contact with the store at {self._address}{why}: {self._facts[0]} or its launcher ended, or its host or network failed; "
            "see its log. Nothing is lost: the next start of all ranks resumes from the newest checkpoint and the batch log"
        )

    def _exit(self, end: End) -> None:
        """End this process if its main thread does not end by itself within `leave_s` seconds: it may wait in a collective
        forever."""
        if not self._closing.wait(self._leave_s):
            self._end_process(end)

    def _end_process(self, end: End) -> None:
        self._leave()
        self._finish(
            end if end.rank == self._rank else msgspec.structs.replace(end, text=f"{self.own} ends: {end.text}")
        )


class _Beats:
    """Last heartbeat of each rank, with the time at which it was first read."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[bytes, float]] = {}

    def find_silent(self, beats: dict[int, bytes], silent_s: float) -> list[int]:
        """Record the present heartbeats, and return the ranks whose heartbeat has not changed for `silent_s` seconds. `beats`: rank ->
        heartbeat."""
        now = time.monotonic()
        for rank, beat in beats.items():
            if self._last.get(rank, (None, now))[0] != beat:
                self._last[rank] = (beat, now)
        return [rank for rank in beats if now - self._last[rank][1] >= silent_s]


def wait_for_ranks(store: Store, what: str, ranks: Iterable[int], wait_s: float = LEAVE_S) -> None:
    """Wait until the key `what/rank` of each rank is set, but at most `wait_s` seconds."""
    with contextlib.suppress(RuntimeError):
        if keys := [f"{what}/{rank}" for rank in ranks]:
            store.wait(keys, timedelta(seconds=wait_s))
