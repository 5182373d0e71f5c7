"""Growing files of a run, for readers that read them repeatedly: a later reading reads only what was appended.

events.jsonl  ──> EventFile ──> the events with some names, in order
samples.jsonl ──> SampleFile ──> series of points, thinned as they grow
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq.messages import Event

OF_EPISODES = frozenset({"episode", "eval"})
"""Names of events that are not kept: events of single episodes are most of the file, and the index (`index.py`) has their
content."""
CHUNK_BYTES = 8 * 1024 * 1024
HEAD_BYTES = 256
"""Number of bytes at a file's beginning that are compared to recognise that the file was replaced."""
MAX_SAMPLES = 4000
"""Maximum number of samples that are kept of one series; of a longer series, every second, fourth, eighth, ... is kept."""

_event = msgspec.json.Decoder(Event)
_line = msgspec.json.Decoder(dict[str, Any])


class _Name(msgspec.Struct):
    name: str


_name = msgspec.json.Decoder(_Name)


class FollowedFile:
    """Base of readers of a file to which lines are appended. Their methods may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        """Number of bytes read so far, by all readings together."""
        self._offset, self._head, self._inode = 0, b"", 0
        self._tail = b""
        """Bytes after the last line break: a line that is still being written, or the last line of a file that does not end
        with a line break."""
        self._lock = threading.Lock()

    def _forget(self) -> None:
        """Forget everything, because another file is in its place."""
        raise NotImplementedError

    def _take(self, lines: Sequence[bytes]) -> None:
        """Process new complete lines."""
        raise NotImplementedError

    def _follow(self) -> None:
        """Read what was appended. Raises OSError."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(len(self._head))
            if status.st_size < self._offset or status.st_ino != self._inode or head != self._head:
                self._forget()
                self._offset, self._inode = 0, status.st_ino
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                self.bytes_read += len(chunk)
                rest += chunk
                end = rest.rfind(b"\n") + 1
                self._take(rest[:end].splitlines())
                self._offset, rest = self._offset + end, rest[end:]
            self._tail = rest
            file.seek(0)
            self._head = file.read(min(HEAD_BYTES, self._offset))


class EventFile(FollowedFile):
    """The events of one run. Lines are decoded when they are wanted, which takes less memory than their values."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines: list[tuple[str, bytes]] = []

    def read(self, names: Collection[str]) -> Iterator[Event]:
        """Yield the events with these names in order; lines cut by a crash or a full disk are skipped. Raises OSError, and
        ValueError for the name of events that are not kept."""
        if unknown := OF_EPISODES & set(names):
            raise ValueError(
                f"{', '.join(sorted(unknown))}: events of single episodes are not in this file; read them from the index"
            )
        with self._lock:
            self._follow()
            wanted = [line for name, line in [*self._lines, *self._select_named([self._tail])] if name in names]
        for line in wanted:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                yield _event.decode(line)

    def _forget(self) -> None:
        self._lines = []

    def _take(self, lines: Sequence[bytes]) -> None:
        self._lines += self._select_named(lines)

    def _select_named(self, lines: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                name = _name.decode(line).name
                if name not in OF_EPISODES:
                    yield name, line


class SampleFile(FollowedFile):
    """Samples of queues, engines and proxies that the recorder of a run wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._series: dict[str, _Series] = {}

    def read(self) -> dict[str, list[tuple[float, float]]]:
        """Return series -> its points as time and value; none if there is no such file."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._follow()
            return {name: list(series.points) for name, series in self._series.items()}

    def _forget(self) -> None:
        self._series = {}

    def _take(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                sample = _line.decode(line)
                at = sample.get("at")
                if isinstance(at, int | float):
                    for name, value in _points_of(sample):
                        self._series.setdefault(name, _Series()).append((at, value))


class _Series:
    """The points of one series, of which every `every`-th is kept."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._every, self._seen = 1, 0

    def append(self, point: tuple[float, float]) -> None:
        if self._seen % self._every == 0:
            self.points.append(point)
        self._seen += 1
        if len(self.points) > MAX_SAMPLES:
            self.points = self.points[::2]
            self._every *= 2


def _points_of(sample: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield series and value of everything in one line of the file."""
    for name, value in flatten_numbers({key: sample.get(key) or {} for key in ("queues", "open_calls")}):
        kind, _, rest = name.partition("/")
        yield (f"{rest}/messages" if kind == "queues" else f"{rest}/open calls"), value
    for engine, values in (sample.get("engines") or {}).items():
        for name, value in flatten_numbers(values):
            yield f"{engine}/{name}", value
    if isinstance(sample.get("tokens_per_s"), int | float):
        yield "tokens per second", sample["tokens_per_s"]


def flatten_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers in nested values, under names joined by slashes."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", value
