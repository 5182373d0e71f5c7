"""A collector's access to the log of a run with standby collectors: it follows the log, takes over, and appends. `decide/log.py` has
the rules.

  log ──> _read ──read──> APPLY, REPLACE ──> store          (while standing by)
                     ├──> CONFIRMED ──> `append` returns    (while leading)
                     └──> LOST ──> `append` raises FencedError; reading waits for `release`
  inbox without a consumer ──> claim ──> WON ──> `lead` returns

An inbox without a consumer only says when to try. The log alone makes the takeover safe: a leader that is still alive reads the
claim before any further transaction of its own, which is then not valid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol, Self

import msgspec
import structlog

from swarmq.broker import Deliveries, Depth, topology
from swarmq.collector.decide.effects import Close, SaveFile
from swarmq.collector.decide.log import LogPosition, LogReader, ReadResult
from swarmq.collector.store import Store, decode_rows
from swarmq.collector.workers import SILENT_S
from swarmq.config import SwarmJob
from swarmq.errors import BrokerLostError, CollectorError, FencedError
from swarmq.messages import LogEntry, Message, new_id
from swarmq.runtime.files import read_if_exists, write_atomically
from swarmq.transcripts.writer import TranscriptWriter

PREFETCH = 64
PART_BYTES = 1024 * 1024
"""Maximum size in bytes of an entry's body; a larger body is divided among several entries."""

log = structlog.get_logger()


class StandbyIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and time limits of a standby."""

    check_s: float = 1.0
    """Seconds between two checks for a leader."""
    num_checks: int = 7
    """Number of successive checks that must find no leader before a takeover, which gives a leader time to restart or reconnect. The
    last leader, or a collector that founds the log, needs only one."""
    grace_s: float = 5.0
    """Seconds after a claim without checks for a leader, because its sender loads its state."""
    retry_s: float = 2.0
    """Seconds between two attempts at a write that the disk refuses."""
    silent_s: float = SILENT_S
    """Seconds after which the workers of a leader that hangs end, so that its queues have no consumer."""
    read_back_s: float = 300.0
    """Maximum seconds from the broker's confirm of an entry until it is read back."""


INTERVALS = StandbyIntervals()


class StreamBroker(Protocol):
    """The part of a broker that the log uses."""

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None: ...
    async def depths(self, queues: Sequence[str]) -> dict[str, Depth]: ...
    async def declare_stream(self, stream: str) -> None: ...
    def read_stream(
        self, stream: str, *, prefetch: int, next_offset: Callable[[], int], skip: Callable[[int], None]
    ) -> AbstractAsyncContextManager[Deliveries]: ...


class StandbyLog:
    """One collector's access to the log: reads all entries, and appends its own."""

    def __init__(
        self,
        broker: StreamBroker,
        store: Store,
        job: SwarmJob,
        *,
        transcripts: TranscriptWriter | None,
        intervals: StandbyIntervals,
    ) -> None:
        self._broker, self._store = broker, store
        self._run, self._folder = job.run, job.run_folder
        self._transcripts, self._intervals = transcripts, intervals
        self._stream = topology.log(job.run)
        self._reader = LogReader(new_id(), store.position(), is_empty=store.is_empty())
        self._claimed_at = float("-inf")
        self._claimed: asyncio.Future[None] | None = None
        """Done once the log shows whether the appended claim is valid."""
        self._appended: asyncio.Future[LogPosition] | None = None
        self._join_requests: list[str] = []
        self._free = asyncio.Event()
        """Set while no leading `Collector` writes to the store."""
        self._free.set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        broker: StreamBroker,
        store: Store,
        job: SwarmJob,
        *,
        transcripts: TranscriptWriter | None = None,
        intervals: StandbyIntervals = INTERVALS,
    ) -> AsyncIterator[Self]:
        """Read the log while the context is open. Raises CollectorError if the store's log was deleted."""
        end = cls(broker, store, job, transcripts=transcripts, intervals=intervals)
        if not store.position().log:
            await broker.declare_stream(end._stream)
        elif end._stream not in await broker.depths([end._stream]):
            raise CollectorError(
                f"{end._stream} was deleted, so this store and its standbys may differ: start the collector with the newest "
                "store once with collector.standby = false, and move the others' stores away"
            )
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(end._read())
            yield end
            reading.cancel()

    @property
    def term(self) -> int:
        """Term of the newest valid claim that this collector has read."""
        return self._reader.position.term

    async def lead(self, *, take_over: bool = False) -> None:
        """Stand by until this collector leads. From then on only the caller writes to the store, until `release`. `take_over`: claim
        as soon as the store is complete, although another collector may lead."""
        log.info("standing_by")
        while not self._reader.is_leading:
            await (self._wait_until_complete() if take_over else self._wait_until_leaderless())
            await self._claim()
        log.info("leading", term=self.term, transactions=self._reader.position.number)

    def release(self) -> None:
        """Let the log's reader write to the store again, unless this collector still leads; the caller no longer does."""
        if not self._reader.is_leading:
            self._free.set()

    def check(self) -> None:
        """Raise FencedError if this collector no longer leads."""
        if not self._reader.is_leading:
            raise FencedError(f"another collector of run {self._run!r} has taken over with term {self.term}")

    async def append(self, body: bytes) -> LogPosition:
        """Append a transaction, and return its position once it is valid. Raises FencedError if it is not, CollectorError if it
        cannot be read back."""
        self.check()
        self._appended = asyncio.get_running_loop().create_future()
        position = self._reader.position
        try:
            await self._publish(
                LogEntry(
                    run=self._run,
                    what="transaction",
                    log=position.log,
                    term=position.term,
                    number=position.number + 1,
                    body=body,
                )
            )
            return await self._await_read_back(self._appended)
        finally:
            self._appended = None

    async def answer_joins(self) -> None:
        """Append a copy of the store for every standby that has requested one. No transaction may be open."""
        while self._join_requests:
            position = self._reader.position
            log.info("standby_joins", transactions=position.number)
            copy = LogEntry(
                run=self._run,
                what="copy",
                log=position.log,
                term=position.term,
                number=position.number,
                join=self._join_requests[0],
                body=self._store.dump(),
            )
            await self._publish(copy)
            self._join_requests.pop(0)

    # ------------------------------------------------------------------------------------------- taking over

    @property
    def _may_lead(self) -> bool:
        return self._reader.is_complete or not self._reader.has_begun

    async def _wait_until_complete(self) -> None:
        while True:
            await asyncio.sleep(self._intervals.check_s)  # in which the reader gets what there is
            if self._may_lead:
                return

    async def _wait_until_leaderless(self) -> None:
        """Wait until the inbox has had no consumer in `num_checks` successive checks, and this collector may lead."""
        inbox, intervals, reader, num = topology.inbox(self._run), self._intervals, self._reader, 0
        while num < (1 if reader.position.led or not reader.has_begun else intervals.num_checks):
            await asyncio.sleep(intervals.check_s)
            depth = (await self._broker.depths([inbox])).get(inbox, Depth(0, 0))
            is_new = asyncio.get_running_loop().time() - self._claimed_at < intervals.grace_s
            num = num + 1 if self._may_lead and not is_new and not depth.consumers else 0

    async def _claim(self) -> None:
        """Append a claim, and return once the log shows whether it is valid."""
        position, self._claimed = self._reader.position, asyncio.get_running_loop().create_future()
        claim = LogEntry(
            run=self._run,
            what="claim",
            log=position.log or new_id(),
            term=position.term + 1,
            sender=self._reader.me,
            number=position.number,
        )
        await self._publish(claim)
        await self._await_read_back(self._claimed)

    async def _await_read_back(self, read: asyncio.Future[LogPosition] | asyncio.Future[None]) -> LogPosition:
        try:
            async with asyncio.timeout(self._intervals.read_back_s):
                await read
        except TimeoutError:
            raise CollectorError(
                f"{self._stream}: an entry was confirmed but does not arrive; has the broker lost the end of the stream?"
            ) from None
        return read.result() or self._reader.position

    async def _publish(self, entry: LogEntry) -> None:
        parts = range(0, max(len(entry.body), 1), PART_BYTES)
        for part, start in enumerate(parts):
            body = entry.body[start : start + PART_BYTES]
            await self._broker.publish(
                self._stream, msgspec.structs.replace(entry, part=part, num_parts=len(parts), body=body)
            )

    # ------------------------------------------------------------------------------------------- reading

    async def _read(self) -> None:
        async with self._broker.read_stream(
            self._stream,
            prefetch=PREFETCH,
            next_offset=lambda: self._reader.position.offset + 1,
            skip=self._reader.skip,
        ) as deliveries:
            async for delivery in deliveries:
                await self._handle(delivery.message, delivery.arrival.headers[topology.STREAM_OFFSET])
                with suppress(BrokerLostError):
                    await delivery.ack()

    async def _handle(self, entry: Message, offset: int) -> None:
        if not isinstance(entry, LogEntry) or entry.run != self._run:
            self._reader.skip(offset)
            return
        reader, was_leading = self._reader, self._reader.is_leading
        result = reader.read(entry, offset)
        if was_leading and not reader.is_leading:
            self._join_requests.clear()
            if self._appended and not self._appended.done():
                self._appended.set_exception(FencedError(f"another collector leads with term {self.term}"))
            await self._free.wait()
        match result:
            case ReadResult.CONFIRMED:
                if self._appended and not self._appended.done():
                    self._appended.set_result(reader.position)
            case ReadResult.JOIN_REQUESTED:
                self._join_requests.append(entry.join)
            case ReadResult.APPLY:
                await self._retry_write(lambda: self._apply(reader.body))
            case ReadResult.REPLACE:
                await self._retry_write(lambda: self._replace(reader.body))
                log.info("joined", transactions=reader.position.number)
            case ReadResult.GAP:
                log.info("store_copy_requested", reason="this collector's store lacks a part of the history")
                await self._publish(LogEntry(run=self._run, what="join", sender=reader.me, join=reader.join))
            case ReadResult.FOREIGN:
                raise CollectorError(
                    f"the collector's store has a history that is not the one in {self._stream}: move the file away to stand by"
                )
            case ReadResult.WON | ReadResult.LOST:
                self._claimed_at = asyncio.get_running_loop().time()
                await self._retry_write(self._save_position)
        if result is ReadResult.WON:
            self._free.clear()
        if result in {ReadResult.WON, ReadResult.LOST, ReadResult.GAP} and self._claimed and not self._claimed.done():
            self._claimed.set_result(None)

    async def _retry_write(self, write: Callable[[], None]) -> None:
        while True:
            try:
                write()
                return
            except CollectorError as error:
                log.warning("store_unavailable", reason=str(error), retry_s=self._intervals.retry_s)
            await asyncio.sleep(self._intervals.retry_s)

    def _save_position(self) -> None:
        with self._store.transaction():
            self._store.save_position(self._reader.position)

    def _write_files(self, before: Mapping[str, bytes]) -> None:
        """Write the store's registries to the run folder. `before`: file name -> content in the store before the change. A file that
        differs from it was edited on this host while its collector did not lead, and is kept."""
        for path in self._folder.registries:
            stored = self._store.file(path.name)
            if stored != before[path.name] and read_if_exists(path) in {b"", before[path.name]}:
                write_atomically(path, stored) if stored else path.unlink(missing_ok=True)

    def _read_files(self) -> dict[str, bytes]:
        return {path.name: self._store.file(path.name) for path in self._folder.registries}

    def _apply(self, body: bytes) -> None:
        """Write a transaction of the leader, and record the transcripts of the episodes that it closes."""
        closed = []
        effects = decode_rows(body)
        before = self._read_files() if any(isinstance(effect, SaveFile) for effect in effects) else None
        with self._store.transaction():
            for effect in effects:
                if (
                    self._transcripts
                    and isinstance(effect, Close)
                    and (episode := self._store.closed(effect, time.time()))
                ):
                    closed.append(episode)
                self._store.write(effect)
            self._store.save_position(self._reader.position)
        if before is not None:
            self._write_files(before)
        if self._transcripts and closed:
            self._transcripts.offer(closed)

    def _replace(self, body: bytes) -> None:
        before = self._read_files()
        self._store.replace(body)
        self._save_position()
        self._write_files(before)
