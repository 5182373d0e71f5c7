r"""The records of transcripts, and the segment files that hold them.

  <folder>/000000000001.seg
  segment = "SQTRSEG\n", schema, generation, crc                                               then frames
  frame   = "SQTR", meta length, body length, meta crc, body crc, header crc; meta; body

The meta is the msgpack of a `TranscriptMeta`, the body the zstd-compressed msgpack of [begin, end or nil, [turn, ...]], each as the
bytes that arrived. Segments are appended to, and rewritten as a whole (temporary file, rename, next generation) when bodies are
removed: such a frame has a body of length 0. A frame without meta stands for a frame that was damaged or forgotten, so that the
frames after it keep their numbers. Checksums are CRC-32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import structlog
import zstandard

from swarmq.messages import EpisodeBegin, EpisodeEnd, Message, Mode, Turn

log = structlog.get_logger()

SCHEMA = 1
SEGMENT_MAGIC = b"SQTRSEG\n"
FRAME_MAGIC = b"SQTR"
SEGMENT = struct.Struct("<8sIII")
FRAME = struct.Struct("<4sIIIII")
BYTES = struct.Struct(">BI")
"""msgpack's type and length of a long bytes object (0xC6) or list (0xDD)."""
SUFFIX = ".seg"
SEARCH_BYTES = 1024 * 1024
COMPRESSION_LEVEL = 3


class TranscriptMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about one closed episode, which stay when its conversation is removed."""

    episode_id: str
    state: str
    """`trained`, `dropped` or `eval`."""
    reason: str = ""
    """Why the episode was dropped; for an evaluation episode its status; empty if it was trained."""
    mode: Mode = "train"
    kind: str
    slot: str
    """`Slot.id` of the episode's slot."""
    task_id: str
    group_id: str
    attempt: int = 0
    group_size: int
    client_id: str
    code_version: str = ""
    policies: tuple[str, ...]
    status: str = ""
    """`EpisodeEnd.status`; empty if no end arrived."""
    detail: str = ""
    """`EpisodeEnd.reason`, shortened."""
    rewards: dict[str, float] = {}
    success: bool | None = None
    metrics: dict[str, float] = {}
    """The first `writer.MAX_ENTRIES` entries of `EpisodeEnd.metrics`."""
    began_at: float
    """Unix time by the collector's clock, as all times of this record."""
    ended_at: float
    """Time when the episode's end was decided."""
    closed_at: float
    """Time when the episode was settled: for a trained episode, when its learner had reported."""
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Number of tokens of all prompts together, shared tokens included."""
    versions: tuple[int, int] | None = None
    """Oldest and newest weight version that sampled a token."""
    outcomes: dict[str, tuple[str, int, str]] = {}
    """Policy -> (`trained`, `dropped` or `pending`, weight version after the step, reason), for episodes that learners were given."""
    orphan_turns: int = 0
    """Number of turns whose answers the agent did not receive, for episodes that learners were given."""
    body_bytes: int = 0
    """Uncompressed size of the conversation in bytes; 0 once it has been removed."""


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One closed episode as it was recorded."""

    meta: TranscriptMeta
    begin: EpisodeBegin
    end: EpisodeEnd | None
    turns: tuple[Turn, ...]
    """All recorded turns, in order of arrival."""

    @property
    def received(self) -> frozenset[str] | None:
        """Ids of the calls whose answers the agent received, and which were kept for training; None: not decided."""
        return None if self.end is None or self.end.calls is None else frozenset(self.end.calls)


class Position(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Place of a transcript. It stays valid when its segment is rewritten."""

    segment: int
    number: int
    """Index of the frame in its segment."""
    offset: int
    """Byte offset of the frame in this generation of the segment."""
    generation: int


class Frame(NamedTuple):
    """One frame of a segment: a transcript, or what a damaged or forgotten one left."""

    number: int
    offset: int
    meta: bytes
    """msgpack of a `TranscriptMeta`; empty if the frame is damaged or forgotten."""
    body_size: int
    end: int
    """Byte offset of the end of the frame."""


_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_body: msgspec.msgpack.Decoder[tuple[bytes, bytes | None, list[bytes]]] = msgspec.msgpack.Decoder(
    tuple[bytes, bytes | None, list[bytes]]
)


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:012d}{SUFFIX}"


def find_segments(folder: Path) -> list[int]:
    """Return the numbers of all segments, oldest first; none if the folder does not exist or cannot be read."""
    try:
        return sorted(int(path.stem) for path in folder.iterdir() if path.suffix == SUFFIX and path.stem.isdecimal())
    except OSError:
        return []


def pack_segment_header(generation: int) -> bytes:
    head = SEGMENT.pack(SEGMENT_MAGIC, SCHEMA, generation, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def read_segment_header(file: BinaryIO) -> int | None:
    """Return the segment's generation and leave the file at its first frame; None if this is not a readable segment."""
    head = file.read(SEGMENT.size)
    if len(head) < SEGMENT.size:
        return None
    magic, schema, generation, checksum = SEGMENT.unpack(head)
    if magic != SEGMENT_MAGIC or schema > SCHEMA or checksum != zlib.crc32(head[:-4]):
        return None
    return int(generation)


def pack_body(begin: bytes, end: bytes | None, turns: Sequence[bytes]) -> bytes:
    """Return the uncompressed body: msgpack, written by hand because the encoder would copy every message more than once."""
    parts = [b"\x93", BYTES.pack(0xC6, len(begin)), begin]
    parts += [b"\xc0"] if end is None else [BYTES.pack(0xC6, len(end)), end]
    parts.append(BYTES.pack(0xDD, len(turns)))
    for turn in turns:
        parts += (BYTES.pack(0xC6, len(turn)), turn)
    return b"".join(parts)


def pack_frame(meta: bytes, body: bytes) -> bytes:
    """Return a frame. `body`: compressed, or empty."""
    head = FRAME.pack(FRAME_MAGIC, len(meta), len(body), zlib.crc32(meta), zlib.crc32(body), 0)[:-4]
    return b"".join((head, struct.pack("<I", zlib.crc32(head)), meta, body))


def walk(file: BinaryIO, *, offset: int = SEGMENT.size, number: int = 0, name: str = "") -> Iterator[Frame]:
    """Yield the frames from `offset` on. `number`: index of the first of them in the segment. `name`: name for warnings. An
    incomplete last frame is left out: it is being written, or its writer was killed. Other damage is skipped with a warning
    and yielded as one frame without meta."""
    size = file.seek(0, 2)
    while offset + FRAME.size <= size:
        file.seek(offset)
        lengths = _lengths(file.read(FRAME.size))
        if lengths is None or offset + FRAME.size + sum(lengths[:2]) > size:
            found = _find_frame(file, offset + 1, size)
            if found is None:
                return
            log.warning("transcript_damaged", segment=name, at=offset, bytes=found - offset)
            yield Frame(number, offset, b"", 0, found)
            offset = found
        else:
            meta_size, body_size, checksum = lengths
            meta = file.read(meta_size)
            if zlib.crc32(meta) != checksum:
                log.warning("transcript_damaged", segment=name, at=offset, bytes=meta_size + body_size)
                meta = b""
            end = offset + FRAME.size + meta_size + body_size
            yield Frame(number, offset, meta, body_size if meta else 0, end)
            offset = end
        number += 1


def read_body(file: BinaryIO, frame: Frame) -> bytes | None:
    """Return the compressed body of a frame; None if it was removed or is damaged."""
    if not frame.body_size:
        return None
    file.seek(frame.offset)
    *_, checksum, _ = FRAME.unpack(file.read(FRAME.size))
    file.seek(frame.end - frame.body_size)
    body = file.read(frame.body_size)
    return body if zlib.crc32(body) == checksum else None


def decode_meta(frame: Frame) -> TranscriptMeta | None:
    """Return a frame's meta, with `body_bytes` 0 if its body was removed; None if the frame has no readable meta."""
    if not frame.meta:
        return None
    try:
        meta = msgspec.msgpack.decode(frame.meta, type=TranscriptMeta)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return meta if frame.body_size else msgspec.structs.replace(meta, body_bytes=0)


def decode_body(meta: TranscriptMeta, compressed: bytes) -> Transcript | None:
    """Return the transcript, or None if the body cannot be read."""
    try:
        begin, end, turns = _body.decode(zstandard.decompress(compressed))
        first, last = _messages.decode(begin), None if end is None else _messages.decode(end)
        recorded = tuple(turn for body in turns if isinstance(turn := _messages.decode(body), Turn))
    except (msgspec.MsgspecError, zstandard.ZstdError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(first, EpisodeBegin) or not isinstance(last, EpisodeEnd | None):
        return None
    return Transcript(meta=meta, begin=first, end=last, turns=recorded)


def _lengths(header: bytes) -> tuple[int, int, int] | None:
    """Return size of meta, size of body and checksum of the meta; None if the bytes are not a valid header."""
    if len(header) < FRAME.size:
        return None
    magic, meta_size, body_size, meta_checksum, _, checksum = FRAME.unpack(header)
    if magic != FRAME_MAGIC or zlib.crc32(header[:-4]) != checksum:
        return None
    return meta_size, body_size, meta_checksum


def _find_frame(file: BinaryIO, offset: int, size: int) -> int | None:
    """Return the offset of the next valid frame header that is followed by a whole frame, or None."""
    while offset + FRAME.size <= size:
        file.seek(offset)
        chunk = file.read(SEARCH_BYTES)
        at = chunk.find(FRAME_MAGIC)
        while at >= 0:
            file.seek(offset + at)
            lengths = _lengths(file.read(FRAME.size))
            if lengths is not None and offset + at + FRAME.size + sum(lengths[:2]) <= size:
                return offset + at
            at = chunk.find(FRAME_MAGIC, at + 1)
        offset += max(len(chunk) - len(FRAME_MAGIC) + 1, 1)
    return None
