"""Which files of a run clients may read: batch logs, checkpoints and other records, but no secret, no settings and no database.

A path from a request never leaves the run folder: neither by `..` nor by a symbolic link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from swarmq.config import RunFolder
from swarmq.proxy.http_errors import RefusedError
from swarmq.remote.records import FileView

PIECE_BYTES = 16 * 1024 * 1024
"""Maximum size of one answer; a larger file is read in several."""
TAIL_BYTES = 1024 * 1024
"""Maximum bytes of a log that are sent before what is appended to it."""
POLL_S = 0.5
"""Seconds between two checks whether something was appended."""


def list_files(folder: RunFolder, policies: Iterable[str], under: str = "") -> list[FileView]:
    """Return the readable files below a path, in the order of their paths. `policies`: names of all policies of the run."""
    start = PurePosixPath(under)
    found = []
    for root in _list_readable(folder, policies):
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            relative = PurePosixPath(path.relative_to(folder.path))
            if relative.is_relative_to(start) and path.is_file() and _is_inside(folder.path, path):
                found.append(FileView(path=str(relative), size_bytes=path.stat().st_size))
    return found


def read_piece(folder: RunFolder, policies: Iterable[str], path: str, offset: int) -> tuple[bytes, int]:
    """Return up to `PIECE_BYTES` of a file from `offset` on, and the size of the file. Raises RefusedError if it may not be read."""
    wanted = folder.path / path
    roots = _list_readable(folder, policies)
    if not any(wanted.is_relative_to(root) for root in roots) or not _is_inside(folder.path, wanted):
        raise RefusedError(
            f"path: the run has no file {path[:200]!r} to read", status=404, code="file_unknown", param="path"
        )
    with wanted.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE_BYTES), wanted.stat().st_size


async def follow_log(path: Path, is_running: Callable[[], bool], *, lines: int, follow: bool) -> AsyncIterator[bytes]:
    """Yield the last lines of a log, and then, with `follow`, what is appended to it until the run has ended."""
    position, is_last = 0, not follow
    while True:
        is_last = is_last or not is_running()
        piece, position = await asyncio.to_thread(_read_from, path, position, lines)
        if piece:
            yield piece
        elif is_last:
            return
        else:
            await asyncio.sleep(POLL_S)


def _read_from(path: Path, position: int, lines: int) -> tuple[bytes, int]:
    """Return the bytes of a log from `position` on, and the position after them. From 0: at most the last `lines` lines."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(position, size - TAIL_BYTES))
            piece = file.read(TAIL_BYTES)
    except FileNotFoundError:  # the run is queued
        return b"", position
    if not position:
        piece = b"".join(piece.splitlines(keepends=True)[-lines:])
    return piece, size


def _list_readable(folder: RunFolder, policies: Iterable[str]) -> Iterator[Path]:
    yield from (folder.events, folder.board, folder.samples, folder.logs, folder.transcripts, folder.replays)
    for policy in policies:
        yield from (
            folder.batch_log(policy),
            folder.checkpoints(policy),
            folder.token_log(policy),
            folder.trackers(policy),
        )


def _is_inside(folder: Path, path: Path) -> bool:
    """Return whether the path exists and leads to a file of the folder through no symbolic link."""
    try:
        return path.resolve(strict=True) == folder.resolve() / path.relative_to(folder) and path.is_file()
    except OSError:
        return False
