"""The writer of transcripts: a thread of the collector, off its hot path.

  collector ──offer(episodes closed by a committed transaction)──> queue, bounded in bytes ──> thread: describe, compress, append
                                                                                                  └── retention: rewrite, remove

The collector does not wait for the thread. Transcripts are lost, and counted, when the queue or the disk is full; later ones are
recorded again as soon as there is room. Transcripts of the last transactions before a crash are lost, too, but not counted: they
are written after the commit, and cannot be restored.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zstandard

from swarmq.messages import EpisodeBegin, EpisodeEnd, Message, VersionSpan
from swarmq.runtime.files import fsync_folder, write_whole
from swarmq.transcripts.format import (
    COMPRESSION_LEVEL,
    SEGMENT,
    Frame,
    TranscriptMeta,
    decode_meta,
    find_segments,
    pack_body,
    pack_frame,
    pack_segment_header,
    read_segment_header,
    segment_path,
    walk,
)
from swarmq.transcripts.retention import FORGOTTEN, TARGET, Classes, RetentionPlan, SegmentIndex, plan_age, plan_size

log = structlog.get_logger()

SEGMENT_BYTES = 32 * 1024 * 1024
"""Size of a segment in bytes after which the next one begins; smaller under a small cap."""
SEGMENTS_PER_CAP = 16
SEGMENTS_PER_AGE = 30
"""Minimum number of segments within the age limit, so that old transcripts go soon after their time."""
QUEUE_BYTES = 64 * 1024 * 1024
"""Maximum number of bytes that wait for the thread."""
BATCH_BYTES = 512 * 1024
"""Bytes after which a batch of transcripts is compressed and appended. Small batches use the same memory again; batches of a
few MiB allocate it anew each time, for which the thread would hold the interpreter lock three times as long."""
CHECK_S = 60.0
"""Seconds between two searches for segments past the age limit."""
WARN_S = 600.0
"""Minimum seconds between two warnings."""
CLOSE_S = 10.0
"""Maximum seconds that the collector waits for the thread when it stops."""
MAX_DETAIL = 2000
"""Maximum number of characters of `TranscriptMeta.detail`."""
MAX_ENTRIES = 256
"""Maximum number of entries of a mapping in `TranscriptMeta`."""


class ClosedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that was settled, with its messages as they arrived."""

    episode_id: str
    state: str
    reason: str
    began_at: float
    ended_at: float
    closed_at: float
    begin: bytes
    end: bytes | None
    turns: list[bytes]
    """Turns and delivery reports, in order of arrival."""
    outcomes: Sequence[tuple[str, str, int, str]]
    """(policy, state, version, reason) of each learner to which the episode was sent; empty if there was none."""
    size: int
    """Size of all its messages together in bytes."""


class _TurnFacts(msgspec.Struct):
    """The fields of a turn from which its meta is computed. `type` tells turns from delivery reports, which are decoded
    alike."""

    type: str
    shared: int = 0
    prompt_ids: bytes = b""
    sampled_ids: bytes = b""
    call_id: str = ""
    versions: tuple[VersionSpan, ...] = ()
    routed_experts: bytes = b""


_turns = msgspec.msgpack.Decoder(_TurnFacts)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def describe(closed: ClosedEpisode) -> tuple[TranscriptMeta, bytes]:
    """Return the meta and the uncompressed body of a closed episode."""
    begin = _messages.decode(closed.begin)
    end = _messages.decode(closed.end) if closed.end else None
    assert isinstance(begin, EpisodeBegin) and isinstance(end, EpisodeEnd | None)  # noqa: PT018
    facts = [(body, _turns.decode(body)) for body in closed.turns]
    facts = [(body, turn) for body, turn in facts if turn.type == "turn"]
    body = pack_body(closed.begin, closed.end or None, [_leave_experts_out(body, turn) for body, turn in facts])
    versions = [span.version for _, turn in facts for span in turn.versions]
    sampled = sum(len(turn.sampled_ids) for _, turn in facts) // 4
    prompt = sum(turn.shared + len(turn.prompt_ids) // 4 for _, turn in facts)
    orphans = 0
    if closed.outcomes and end is not None and end.calls is not None:
        received = set(end.calls)
        orphans = sum(turn.call_id not in received for _, turn in facts)
    meta = TranscriptMeta(
        episode_id=closed.episode_id,
        state=closed.state,
        reason=closed.reason,
        mode=begin.mode,
        kind=begin.kind,
        slot=begin.slot.id,
        task_id=begin.slot.task_id,
        group_id=begin.slot.group_id,
        attempt=begin.attempt,
        group_size=begin.group_size,
        client_id=begin.client_id,
        code_version=begin.code_version,
        policies=begin.policies,
        status=end.status if end else "",
        detail=end.reason[:MAX_DETAIL] if end else "",
        rewards=_limit_entries(end.rewards) if end else {},
        success=end.success if end else None,
        metrics=_limit_entries(end.metrics) if end else {},
        began_at=closed.began_at,
        ended_at=closed.ended_at,
        closed_at=closed.closed_at,
        turns=len(facts),
        sampled_tokens=sampled,
        prompt_tokens=prompt,
        versions=(min(versions), max(versions)) if versions else None,
        outcomes={policy: (state, version, reason) for policy, state, version, reason in closed.outcomes},
        orphan_turns=orphans,
        body_bytes=len(body),
    )
    return meta, body


def _leave_experts_out(body: bytes, turn: _TurnFacts) -> bytes:
    """Return a turn without its routed experts, which nobody reads in a transcript and which would take most of its room."""
    if not turn.routed_experts:
        return body
    fields: dict[str, Any] = msgspec.msgpack.decode(body)
    fields["routed_experts"] = b""
    return msgspec.msgpack.encode(fields)


def _limit_entries(entries: dict[str, float]) -> dict[str, float]:
    """Return the first `MAX_ENTRIES` entries of a mapping, because metas are kept in large numbers."""
    return entries if len(entries) <= MAX_ENTRIES else dict(list(entries.items())[:MAX_ENTRIES])


class Segments:
    """The segment files of one run, extended and thinned out by one process. All methods raise OSError if the disk refuses."""

    def __init__(self, folder: Path, *, size_bytes: int, age_s: float, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._size_bytes = size_bytes
        self._age_s = age_s
        self._segment_bytes = min(segment_bytes, size_bytes // SEGMENTS_PER_CAP)
        self._classes = Classes()
        self._all: list[SegmentIndex] = []
        self._descriptor: int | None = None
        self._began_at = 0.0
        """Unix time when the first episode of the last segment was closed."""
        self._total = 0
        self._limit = size_bytes

    def open(self) -> None:
        """Index the existing transcripts, and cut off a last one that was written in part."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for draft in self._folder.glob("*.part"):
            draft.unlink()
        self._all = []
        for number in find_segments(self._folder):
            index = self._index(number)
            if index is not None:
                self._all.append(index)
        self._total = sum(one.size for one in self._all)
        if self._all:
            self._reopen()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def append(self, metas: list[TranscriptMeta], bodies: list[bytes]) -> None:
        """Append transcripts with these compressed bodies, all of them or none."""
        if self._descriptor is None or self._is_full(metas[0].closed_at):
            self._start(metas[0].closed_at)
        assert self._descriptor is not None
        last = self._all[-1]
        data = b"".join(pack_frame(msgspec.msgpack.encode(m), body) for m, body in zip(metas, bodies, strict=True))
        try:
            write_whole(self._descriptor, data, last.size)
        except OSError:
            self._undo(last.size)
            raise
        last.size += len(data)
        self._total += len(data)
        for meta, body in zip(metas, bodies, strict=True):
            last.add(self._classes.number(meta.kind, meta.state, meta.reason), len(body), meta.closed_at)

    def make_room(self) -> None:
        """Remove conversations if the segments exceed the size cap."""
        if self._total <= self._limit:
            return
        target = int(self._size_bytes * TARGET)
        try:
            self._carry_out(plan_size(self._all, self._classes.interest, cap=self._size_bytes, target=target))
        finally:
            # Protected bodies may exceed the cap, or nothing can be rewritten: plan again only after as much was added.
            self._limit = max(self._size_bytes, self._total + self._size_bytes - target)

    def expire(self, now: float) -> None:
        """Remove segments past the age limit."""
        if self._descriptor is not None and self._all[-1].bodies and now - self._began_at > self._age_s:
            self._start(now)
        self._carry_out(plan_age(self._all, before=now - self._age_s))

    @property
    def total(self) -> int:
        """Size of all segments together in bytes."""
        return self._total

    def _is_full(self, now: float) -> bool:
        last = self._all[-1]
        aged = bool(last.bodies) and now - self._began_at > self._age_s / SEGMENTS_PER_AGE
        return last.size >= self._segment_bytes or aged

    def _undo(self, size: int) -> None:
        """Cut the last segment back to `size` bytes, its size before a failed write; if even that fails, start another
        segment."""
        assert self._descriptor is not None
        try:
            os.ftruncate(self._descriptor, size)
        except OSError:
            self.close()

    def _start(self, now: float) -> None:
        self.close()
        number = max([*(one.number for one in self._all), *find_segments(self._folder)], default=0) + 1
        self._replace(segment_path(self._folder, number), [pack_segment_header(0)])
        self._all.append(SegmentIndex(number=number, size=SEGMENT.size))
        self._total += SEGMENT.size
        self._descriptor = os.open(segment_path(self._folder, number), os.O_WRONLY | os.O_CLOEXEC)
        self._began_at = now

    def _reopen(self) -> None:
        self.close()
        last = self._all[-1]
        self._descriptor = os.open(segment_path(self._folder, last.number), os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(self._descriptor, last.size)

    def _index(self, number: int) -> SegmentIndex | None:
        """Return the index of a segment up to its last whole frame; None if it is gone or not a readable segment."""
        path = segment_path(self._folder, number)
        with path.open("rb") as file:
            generation = read_segment_header(file)
            if generation is None:
                log.warning("transcript_damaged", segment=str(path), at=0, reason="not a segment; it is left alone")
                return None
            index = SegmentIndex(number=number, generation=generation, size=SEGMENT.size)
            for frame in walk(file, name=str(path)):
                meta = decode_meta(frame)
                if meta is None:
                    index.add(FORGOTTEN, 0, 0.0)
                else:
                    if not index.newest_at:
                        self._began_at = meta.closed_at
                    class_ = self._classes.number(meta.kind, meta.state, meta.reason)
                    index.add(class_, frame.body_size, meta.closed_at)
                index.size = frame.end
            return index

    def _carry_out(self, plan: RetentionPlan) -> None:
        if not plan:
            return
        for number in plan.remove:
            segment_path(self._folder, number).unlink(missing_ok=True)
            self._all = [one for one in self._all if one.number != number]
            self._total = sum(one.size for one in self._all)
        for index in self._all:
            strip, forget = plan.strip.get(index.number, frozenset()), plan.forget.get(index.number, frozenset())
            if strip or forget:
                self._rewrite(index, strip, forget)
                self._total = sum(one.size for one in self._all)

    def _rewrite(self, index: SegmentIndex, strip: frozenset[int], forget: frozenset[int]) -> None:
        """Write the next generation of a segment, without the bodies of the frames `strip` and without any content of the
        frames `forget`."""
        path = segment_path(self._folder, index.number)

        def parts() -> Iterable[bytes]:
            yield pack_segment_header(index.generation + 1)
            with path.open("rb") as file:
                for frame in walk(file, name=str(path)):
                    if frame.number >= len(index.bodies):
                        return
                    yield _thin(file, frame, strip=frame.number in strip, forget=frame.number in forget)

        size = self._replace(path, parts())
        for frame in strip | forget:
            index.bodies[frame] = 0
        for frame in forget:
            index.classes[frame] = FORGOTTEN
        index.generation, index.size = index.generation + 1, size
        if index is self._all[-1] and self._descriptor is not None:
            self._reopen()

    def _replace(self, path: Path, parts: Iterable[bytes]) -> int:
        """Write a file under a temporary name, rename it, and return its size. A crash leaves the old file or the new one."""
        draft = path.with_suffix(".part")
        size = 0
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                for part in parts:
                    size += file.write(part)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        fsync_folder(self._folder)
        return size


def _thin(file: Any, frame: Frame, *, strip: bool, forget: bool) -> bytes:
    """Return the bytes of a frame without its body (`strip`), or without any content (`forget`)."""
    if forget or not frame.meta:
        return pack_frame(b"", b"")
    if strip:
        return pack_frame(frame.meta, b"")
    file.seek(frame.offset)
    data: bytes = file.read(frame.end - frame.offset)
    return data


class TranscriptWriter:
    """The queue and the thread. `offer` and `warnings` never block; `close` is called once."""

    def __init__(
        self,
        folder: Path,
        *,
        size_bytes: int,
        age_s: float,
        clock: Callable[[], float] = time.time,
        queue_bytes: int = QUEUE_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.lost = 0
        """Number of transcripts that could not be recorded since the collector started."""
        self._folder = folder
        self._clock = clock
        self._queue_bytes = queue_bytes
        self._segments = Segments(folder, size_bytes=size_bytes, age_s=age_s, segment_bytes=segment_bytes)
        self._is_open = False
        self._queue: deque[ClosedEpisode] = deque()
        self._queued_bytes = 0
        self._stopping = False
        self._changed = threading.Condition()
        self._warnings: deque[str] = deque()
        self._warn_at = -WARN_S
        self._is_losing = False
        self._compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
        self._thread = threading.Thread(target=self._run, name="transcripts", daemon=True)
        self._thread.start()

    def offer(self, closed: list[ClosedEpisode]) -> None:
        """Record episodes that a committed transaction closed, as far as there is room in the queue."""
        lost = 0
        with self._changed:
            for episode in closed:
                if self._queued_bytes + episode.size > self._queue_bytes:
                    lost += 1
                else:
                    self._queue.append(episode)
                    self._queued_bytes += episode.size
            self._changed.notify()
        if lost:
            self._lose(lost, f"{self._folder}: transcripts come faster than they can be written")

    def warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        found = []
        while self._warnings:
            found.append(self._warnings.popleft())
        return found

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the waiting transcripts and end the thread; after `timeout_s` the remaining ones are lost."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        next_check = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping, timeout=CHECK_S)
                batch, size = self._take()
                if not batch and self._stopping:
                    break
            self._record(batch)
            with self._changed:
                self._queued_bytes -= size
                self._changed.notify_all()
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + CHECK_S
                self._keep_caps(expire=True)
            else:
                self._keep_caps(expire=False)
        self._segments.close()

    def _take(self) -> tuple[list[ClosedEpisode], int]:
        batch, size = [], 0
        while self._queue and size < BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += batch[-1].size
        return batch, size

    def _record(self, batch: list[ClosedEpisode]) -> None:
        described = []
        for closed in batch:
            try:
                described.append(describe(closed))
            except Exception as error:  # a bug, which must not end the recording of others
                self._lose(1, f"{closed.episode_id}: {error!r}")
        if not described:
            return
        try:
            if not self._is_open:
                self._segments.open()
                self._is_open = True
            bodies = self._compress([body for _, body in described])
            self._segments.append([meta for meta, _ in described], bodies)
        except OSError as error:
            self._lose(len(described), f"{self._folder}: {error.strerror or error}")
        else:
            if self._is_losing:
                log.info("transcripts_recorded_again", lost=self.lost)
            self._is_losing = False

    def _compress(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Compress all bodies in one call, which releases the interpreter lock once instead of once per body."""
        done = self._compressor.multi_compress_to_buffer(list(bodies))
        return [done[number].tobytes() for number in range(len(bodies))]

    def _keep_caps(self, *, expire: bool) -> None:
        if not self._is_open:
            return
        try:
            if expire:
                self._segments.expire(self._clock())
            self._segments.make_room()
        except OSError as error:
            self._warn(f"{self._folder}: {error.strerror or error}")

    def _lose(self, num: int, reason: str) -> None:
        self.lost += num
        if not self._is_losing:
            self._is_losing = True
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        now = time.monotonic()
        if now < self._warn_at:
            return
        self._warn_at = now + WARN_S
        log.warning("transcripts_lost", reason=reason, lost=self.lost, action="training goes on")
        self._warnings.append(f"transcripts are lost, training goes on: {reason}")
