"""Reading of transcripts by other processes, during and after a run. Nothing is locked or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import structlog

from swarmq.transcripts.format import (
    SEGMENT,
    Frame,
    Position,
    Transcript,
    TranscriptMeta,
    decode_body,
    decode_meta,
    find_segments,
    read_body,
    read_segment_header,
    segment_path,
    walk,
)

log = structlog.get_logger()


def generations(folder: Path) -> dict[int, int]:
    """Return segment -> generation. A segment of another generation than before was rewritten: some of its transcripts are gone."""
    found = {}
    for segment in find_segments(folder):
        with _open(folder, segment) as (file, generation):
            if file is not None:
                found[segment] = generation
    return found


def scan(folder: Path, *, after: Position | None = None) -> Iterator[tuple[Position, TranscriptMeta]]:
    """Yield the meta of every transcript in the order in which episodes were closed, from the one after `after` on.

    Damaged frames are skipped with a warning. A folder that does not exist is empty.
    """
    for segment in find_segments(folder):
        if after is None or segment > after.segment:
            yield from scan_segment(folder, segment)
        elif segment == after.segment:
            yield from scan_segment(folder, segment, after=after)


def scan_segment(
    folder: Path, segment: int, *, after: Position | None = None
) -> Iterator[tuple[Position, TranscriptMeta]]:
    """Yield the metas of one segment, as `scan` does."""
    with _open(folder, segment) as (file, generation):
        if file is None:
            return
        for frame in _walk_from(file, generation, after, name=str(segment_path(folder, segment))):
            meta = decode_meta(frame) if after is None or frame.number > after.number else None
            if meta is not None:
                yield Position(segment, frame.number, frame.offset, generation), meta


def read(folder: Path, where: Position | str) -> Transcript | None:
    """Return the transcript at a position or of an episode; None if it was removed, is damaged, or never was there.

    An episode id is searched for in all segments, newest first.
    """
    if isinstance(where, str):
        for segment in reversed(find_segments(folder)):
            for position, meta in scan_segment(folder, segment):
                if meta.episode_id == where:
                    return read(folder, position)
        return None
    with _open(folder, where.segment) as (file, generation):
        if file is None:
            return None
        for frame in _walk_from(file, generation, where, name=str(segment_path(folder, where.segment))):
            if frame.number == where.number:
                return _decode(file, frame, segment_path(folder, where.segment))
    return None


def _decode(file: BinaryIO, frame: Frame, path: Path) -> Transcript | None:
    meta = decode_meta(frame)
    if meta is None or not frame.body_size:
        return None
    body = read_body(file, frame)
    transcript = None if body is None else decode_body(meta, body)
    if transcript is None:
        log.warning("transcript_damaged", segment=str(path), at=frame.offset, episode_id=meta.episode_id)
    return transcript


def _walk_from(file: BinaryIO, generation: int, place: Position | None, *, name: str) -> Iterator[Frame]:
    """Yield the frames from `place` on; all frames of the segment if it was rewritten since, because its offsets then differ."""
    if place is None or place.generation != generation:
        return walk(file, name=name)
    return walk(file, offset=max(place.offset, SEGMENT.size), number=place.number, name=name)


@contextmanager
def _open(folder: Path, segment: int) -> Iterator[tuple[BinaryIO | None, int]]:
    """Open a segment and yield its file and its generation; (None, 0) if it is gone or not a readable segment."""
    path = segment_path(folder, segment)
    try:
        file = path.open("rb")
    except OSError:
        yield None, 0
        return
    with file:
        generation = read_segment_header(file)
        if generation is None:
            log.warning(
                "transcript_damaged", segment=str(path), at=0, reason="not a segment that this version of swarmq reads"
            )
            yield None, 0
        else:
            yield file, generation
