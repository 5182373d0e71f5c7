r"""The append-only, fsynced record of every batch, which makes an acknowledged rollout safe before it is trained.

  <folder>/000000000001.log   named by its first record
  segment = "SQSEGM1\n", length, crc, SegmentHeader (schema, identity)          then records
  record  = "SQRC", number, index length, body length, index crc, body crc, header crc; index; zstd(body)

A record is valid once its fsync has returned. A crash may leave an incomplete last record (a torn tail); its rollouts were never
acknowledged, so it is moved into a file beside the log. Damage anywhere else is an error and is never skipped. Checksums are
CRC-32.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog
import zstandard

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.store.records import SCHEMA, BatchIndex, BatchRecord, RunIdentity, decode_record, encode_record
from swarmq.runtime.files import fsync_folder, write_atomically, write_whole

log = structlog.get_logger()

SEGMENT_MAGIC = b"SQSEGM1\n"
RECORD_MAGIC = b"SQRC"
SEGMENT = struct.Struct("<8sII")
RECORD = struct.Struct("<4sQIIIII")
SEGMENT_BYTES = 64 * 1024 * 1024
SEGMENT_RECORDS = 256
"""Maximum number of records in a segment; a segment may end earlier because of its size. Old segments can be removed."""


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header at the start of every segment."""

    schema: int
    identity: RunIdentity


class RecordPlace(msgspec.Struct, frozen=True):
    """Position of a record in the log, and the record's index."""

    segment: Path
    offset: int
    size: int
    index: BatchIndex


class BatchLog:
    """An open log, to which only `append` adds. The indices of all records are kept in memory."""

    def __init__(
        self,
        folder: Path,
        identity: RunIdentity,
        *,
        needed: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        segment_records: int = SEGMENT_RECORDS,
    ) -> None:
        """Open the log for writing, move a torn tail aside, and make sure that the rest is on disk.

        Raises LearnerError if the log belongs to another run, is newer than this version, damaged or not writable, or if the torn
        tail holds a batch up to version `needed`, the version of the newest checkpoint.
        """
        self.folder, self.identity = folder, identity
        self._segment_bytes, self._segment_records = segment_bytes, segment_records
        self._descriptor: int | None = None
        with map_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.places = scan_log(folder, identity, needed=needed)
            if segments := _segments(folder):
                self._open(segments[-1])

    @property
    def last(self) -> BatchIndex | None:
        return self.places[-1].index if self.places else None

    @property
    def version(self) -> int:
        """Version of the newest batch. The last records may hold only drops and name an older version, if they were written during
        a replay."""
        return next((place.index.version for place in reversed(self.places) if place.index.trained), 0)

    @property
    def indices(self) -> Iterator[BatchIndex]:
        return (place.index for place in self.places)

    def append(self, record: BatchRecord) -> None:
        """Append `record` and return once it is on disk. Raises LearnerError if that fails; the record is then not in the log."""
        expected = self.last.record + 1 if self.last else 1
        assert record.index.record == expected, f"record {record.index.record} appended where {expected} belongs"
        data = _pack(record)
        with map_os_errors(self.folder):
            if self._descriptor is None or self._is_full(record.index.record):
                self._start_segment(record.index.record)
            assert self._descriptor is not None
            try:
                write_whole(self._descriptor, data, self._size)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
                raise
        self.places.append(RecordPlace(self._path, self._size, len(data), record.index))
        self._size += len(data)

    def after(self, version: int) -> Iterator[BatchRecord]:
        """Yield, in order, the batches that continue from the weights of `version`; records that only hold drops are skipped."""
        versions = [place.index.version for place in self.places if place.index.trained]
        if versions and versions[0] > version + 1:
            raise SetUpError(
                f"{self.folder}: the log begins with version {versions[0]}, but the newest usable checkpoint is "
                f"{version}: restore a checkpoint of version {versions[0] - 1} or later, or the removed segments"
            )
        if version > (versions[-1] if versions else 0):
            raise SetUpError(
                f"{self.folder}: the checkpoint is of version {version}, the log ends with {versions[-1] if versions else 0}:"
                " the log was removed or belongs to another run; restore it, or start a run with another name"
            )
        return (read_record(place) for place in self.places if place.index.trained and place.index.version > version)

    def step(self, version: int) -> tuple[BatchRecord, list[BatchIndex]]:
        """Return the batch that was trained to `version`, and the records of drops between it and the previous batch."""
        at = next((n for n in reversed(range(len(self.places))) if self._makes(n, version)), None)
        if at is None:
            raise LearnerError(f"{self.folder}: the log has no batch of version {version}")
        before = (place.index for place in reversed(self.places[:at]))
        return read_record(self.places[at]), list(takewhile(lambda index: not index.trained, before))

    def prune(self, version: int, *, reported: int, spare: int) -> int:
        """Remove whole segments that are no longer needed and return their number.

        Needed are batches after the weights of `version`, records after `reported`, and the ids of the newest `spare` episodes,
        which may still be redelivered. The last segment always stays.
        """
        needed = {self._path} if self._descriptor is not None else set()
        for place in reversed(self.places):
            if spare > 0 or place.index.version > version or place.index.record > reported:
                needed.add(place.segment)
            spare -= len(place.index.trained) + len(place.index.dropped)
        gone = list(takewhile(lambda path: path not in needed, _segments(self.folder)[:-1]))
        with map_os_errors(self.folder):
            for path in gone:
                path.unlink()
            if gone:
                fsync_folder(self.folder)
        self.places = [place for place in self.places if place.segment not in gone]
        return len(gone)

    def _is_full(self, record: int) -> bool:
        return self._size >= self._segment_bytes or record - int(self._path.stem) >= self._segment_records

    def _makes(self, position: int, version: int) -> bool:
        index = self.places[position].index
        return index.version == version and bool(index.trained)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, path: Path) -> None:
        self.close()
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.fsync(self._descriptor)  # the last writer may have been killed before its fsync
        fsync_folder(self.folder)
        self._size = os.fstat(self._descriptor).st_size

    def _start_segment(self, record: int) -> None:
        """Start a segment under a temporary name and rename it, so that no segment has an incomplete header."""
        head = msgspec.msgpack.encode(SegmentHeader(schema=SCHEMA, identity=self.identity))
        path = self.folder / f"{record:012d}.log"
        write_atomically(path, SEGMENT.pack(SEGMENT_MAGIC, len(head), zlib.crc32(head)) + head)
        self._open(path)


def scan_log(folder: Path, identity: RunIdentity | None = None, *, needed: int | None = None) -> list[RecordPlace]:
    """Return position and index of every record. A torn tail is skipped; with `needed`, it is also moved into a file beside the
    log, provided that the log has all batches up to that version without it.

    Raises LearnerError if the log cannot be read, is damaged, newer than this version, or not of `identity`.
    """
    places: list[RecordPlace] = []
    with map_os_errors(folder):
        segments = _segments(folder)
        for segment in segments:
            end = _scan_segment(segment, identity, places, is_last=segment == segments[-1])
            torn = segment.stat().st_size - end
            if torn and needed is not None:
                _set_aside(segment, end, places, needed)
            elif torn:
                log.warning("batch_log_torn_tail", segment=str(segment), at=end, bytes=torn)
    for before, place in pairwise(places):
        if place.index.record != before.index.record + 1:
            raise _damage_error(
                place.segment, place.offset, f"record {place.index.record} follows {before.index.record}"
            )
    return places


def scan_readable(folder: Path, *, after: RecordPlace | None = None) -> tuple[list[RecordPlace], list[str]]:
    """Return the places of all readable records after the record `after`, and a message about each part that cannot be read.

    For readers of copied and damaged folders; records may be missing between those returned."""
    places: list[RecordPlace] = []
    flaws: list[str] = []
    try:
        with map_os_errors(folder):
            segments = _segments(folder)
    except LearnerError as error:
        return [], [str(error)]
    for segment in segments:
        if after is not None and segment.name < after.segment.name:
            continue
        start = after.offset + after.size if after is not None and segment.name == after.segment.name else None
        try:
            with map_os_errors(segment):
                _scan_segment(segment, None, places, is_last=segment == segments[-1], start=start)
        except LearnerError as error:
            flaws.append(str(error))
    return places, flaws


def _set_aside(segment: Path, end: int, places: list[RecordPlace], needed: int) -> None:
    """Move a torn tail into a file beside the log. Raises LearnerError if a checkpoint was trained on its batch: the batch was
    complete once, so the log is damaged."""
    last = max((place.index.version for place in places if place.index.trained), default=0)
    if last < needed:
        raise _damage_error(
            segment, end, f"the log is intact up to version {last}, but a checkpoint is of version {needed}"
        )
    with segment.open("rb+") as file:
        file.seek(end)
        aside = segment.with_name(f"{segment.name}.{end}.torn")
        write_atomically(aside, tail := file.read())
        log.warning("batch_log_torn_tail", segment=str(segment), at=end, bytes=len(tail), moved_to=aside.name)
        file.truncate(end)
        os.fsync(file.fileno())


def number_steps(places: Iterable[RecordPlace], *, trained: int = 0) -> Iterator[tuple[int, RecordPlace]]:
    """Yield every record with a step: the step that trained its episodes or, if it only holds drops, the step after the previous
    batch in the log. A record of drops may name an older version, because the learner logs drops while a step is still being
    trained.

    `trained`: version of the last batch before these records.
    """
    for place in places:
        if place.index.trained:
            trained = place.index.version
        yield trained if place.index.trained else max(trained, place.index.version) + 1, place


def read_record(place: RecordPlace) -> BatchRecord:
    """Return the whole record. Raises LearnerError if a checksum is wrong."""
    with map_os_errors(place.segment), place.segment.open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.size)
    if len(data) < place.size or not _sound(data):
        raise _damage_error(place.segment, place.offset, "wrong checksum")
    _, _, index_size, *_ = RECORD.unpack_from(data)
    try:
        return decode_record(zstandard.decompress(data[RECORD.size + index_size :]))
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise _damage_error(place.segment, place.offset, str(error)) from error


def read_records(folder: Path) -> Iterator[BatchRecord]:
    """Yield all records of a log without locking or writing it, for inspection and replay."""
    return (read_record(place) for place in scan_log(folder))


def _scan_segment(
    segment: Path, identity: RunIdentity | None, places: list[RecordPlace], *, is_last: bool, start: int | None = None
) -> int:
    """Append the segment's records to `places` from `start` on, and return the offset where valid records end."""
    size = segment.stat().st_size
    with segment.open("rb") as file:
        offset = _check_head(file.read(SEGMENT.size + 65536), segment, identity) if start is None else start
        while offset < size:
            file.seek(offset)
            header = file.read(RECORD.size)
            lengths = _lengths(header)
            whole = lengths is not None and offset + RECORD.size + sum(lengths) <= size
            data = b""
            if lengths is not None and whole:
                data = header + file.read(sum(lengths) if is_last else lengths[0])
            if lengths is None or not whole or not _sound(data, body=is_last):
                if is_last and not _later_record(file, offset + 1, size):
                    return offset
                raise _damage_error(segment, offset, "wrong checksum in the middle of the log")
            index = _decode_index(data[RECORD.size : RECORD.size + lengths[0]], segment, offset)
            places.append(RecordPlace(segment, offset, RECORD.size + sum(lengths), index))
            offset += RECORD.size + sum(lengths)
    return offset


def _check_head(data: bytes, segment: Path, identity: RunIdentity | None) -> int:
    try:
        magic, size, checksum = SEGMENT.unpack_from(data)
        raw = data[SEGMENT.size : SEGMENT.size + size]
        if magic != SEGMENT_MAGIC or zlib.crc32(raw) != checksum:
            raise _damage_error(segment, 0, "not a segment of a batch log")
        head = msgspec.msgpack.decode(raw, type=SegmentHeader)
    except (struct.error, msgspec.MsgspecError) as error:
        raise _damage_error(segment, 0, f"its header cannot be read: {error}") from error
    if head.schema > SCHEMA:
        raise SetUpError(
            f"{segment}: written by a newer swarmq (schema {head.schema}, this one knows {SCHEMA}): upgrade swarmq"
        )
    if identity is not None and (difference := identity.difference(head.identity)):
        raise SetUpError(
            f"{segment}: the batch log is of another run, policy or model: {difference}; nothing was changed. "
            "Use another run name or folder"
        )
    return SEGMENT.size + int(size)


def _pack(record: BatchRecord) -> bytes:
    index = msgspec.msgpack.encode(record.index)
    body = zstandard.ZstdCompressor(level=3).compress(encode_record(record))
    header = RECORD.pack(
        RECORD_MAGIC, record.index.record, len(index), len(body), zlib.crc32(index), zlib.crc32(body), 0
    )
    return header[:-4] + struct.pack("<I", zlib.crc32(header[:-4])) + index + body


def _lengths(header: bytes) -> tuple[int, int] | None:
    """Return the sizes of index and body, or None if the bytes are not a valid record header."""
    if len(header) < RECORD.size:
        return None
    magic, _, index_size, body_size, _, _, checksum = RECORD.unpack(header)
    if magic != RECORD_MAGIC or zlib.crc32(header[:-4]) != checksum:
        return None
    return index_size, body_size


def _sound(data: bytes, *, body: bool = True) -> bool:
    """Return whether a record's checksums of header, index and, if `body`, body are correct."""
    lengths = _lengths(data[: RECORD.size])
    if lengths is None:
        return False
    *_, index_checksum, body_checksum, _ = RECORD.unpack_from(data)
    edge = RECORD.size + lengths[0]
    return zlib.crc32(data[RECORD.size : edge]) == index_checksum and (
        not body or zlib.crc32(data[edge : edge + lengths[1]]) == body_checksum
    )


def _later_record(file: BinaryIO, offset: int, size: int) -> bool:
    """Return whether a valid record header begins in [offset, size). If so, the bytes at `offset` are damage and no torn tail."""
    file.seek(offset)
    rest = file.read(size - offset)
    at = rest.find(RECORD_MAGIC)
    while at >= 0:
        if _lengths(rest[at : at + RECORD.size]) is not None:
            return True
        at = rest.find(RECORD_MAGIC, at + 1)
    return False


def _decode_index(raw: bytes, segment: Path, offset: int) -> BatchIndex:
    try:
        return msgspec.msgpack.decode(raw, type=BatchIndex)
    except msgspec.MsgspecError as error:
        raise _damage_error(segment, offset, str(error)) from error


def _segments(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".log")
    except FileNotFoundError:
        return []


def _damage_error(segment: Path, offset: int, what: str) -> LearnerError:
    return LearnerError(
        f"{segment}: damaged at byte {offset} ({what}). Restore the file from a copy; the data after this byte cannot be trusted"
    )
