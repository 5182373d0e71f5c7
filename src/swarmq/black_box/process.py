"""Running of a command to its end, with everything that it has started, and a log of its output.

The command has a session of its own. When it ends, or when its time is up, its session is killed, and then every process that
carries the episode's mark in its environment: agents start servers and background shells in further sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from swarmq.runtime.processes import die_with_parent

READ_BYTES = 65_536
REST_S = 2.0
"""Seconds to read what a command has left in its pipe, after all of its processes have been killed."""
KILL_ROUNDS = 5


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    exit_code: int | None
    """Exit code of the command; negative: number of the signal that killed it; None: its time was up."""
    seconds: float
    tail: str
    """Last lines of the command's output."""


class OutputLog:
    """A log file of limited size. It keeps the beginning of the output, up to half of the limit, and the end, which is written when
    the log is closed."""

    def __init__(self, path: Path, *, limit: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._head_left = self._tail_limit = max(1, limit // 2)
        self._tail: deque[bytes] = deque()
        self._tail_bytes = self._dropped = 0
        self._last = b""

    def write(self, data: bytes) -> None:
        """Write output of a command."""
        self._last = (self._last + data)[-4000:]
        self._write(data)

    def note(self, text: str) -> None:
        """Write a line of swarmq's own, which is no part of the commands' `tail`."""
        self._write(f"[swarmq] {text}\n".encode())

    def _write(self, data: bytes) -> None:
        head, rest = data[: self._head_left], data[self._head_left :]
        self._head_left -= len(head)
        self._file.write(head)
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail_bytes - len(self._tail[0]) >= self._tail_limit if self._tail else False:
            gone = self._tail.popleft()
            self._tail_bytes -= len(gone)
            self._dropped += len(gone)

    @property
    def tail(self) -> str:
        """The last lines of the commands' output."""
        return self._last.decode(errors="replace")[-2000:].strip()

    def close(self) -> None:
        if self._dropped:
            self._file.write(f"\n[swarmq] {self._dropped} bytes left out (--log-limit)\n".encode())
        for piece in self._tail:
            self._file.write(piece)
        self._tail.clear()
        self._file.close()


async def run_command(
    argv: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    mark: str,
    stdin: Path | None,
    log: OutputLog,
    timeout_s: float,
) -> Finished:
    """Run a command until it ends, or kill it after `timeout_s`; either way, no process of it is left.

    `stdin`: file for its standard input; None: no input. `mark`: text `NAME=VALUE` that only processes of this attempt have in their environment. Raises OSError if the command
    cannot be started.
    """
    began = time.monotonic()
    is_late = False
    async with _open_pipe(log) as end, _open_input(stdin) as source:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env=dict(environment),
            stdin=source,
            stdout=end.fileno(),
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
        end.close()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            is_late = True
        finally:
            await asyncio.shield(_kill_all(process, mark))
    code = None if is_late else process.returncode
    return Finished(exit_code=code, seconds=time.monotonic() - began, tail=log.tail)


@contextlib.asynccontextmanager
async def _open_pipe(log: OutputLog) -> AsyncIterator[BinaryIO]:
    """Yield the end of a pipe to write to; what is written goes into the log. At the end, wait for what is left in the pipe.

    A pipe of asyncio's own would keep `process.wait()` waiting for all processes that have inherited it.
    """
    read_fd, write_fd = os.pipe()
    reader = asyncio.StreamReader()
    with os.fdopen(read_fd, "rb", 0) as read_end, os.fdopen(write_fd, "wb", 0) as write_end:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), read_end)
        reading = asyncio.create_task(_read_into(reader, log))
        try:
            yield write_end
        finally:
            write_end.close()
            await asyncio.wait((reading,), timeout=REST_S)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            transport.close()


@contextlib.asynccontextmanager
async def _open_input(path: Path | None) -> AsyncIterator[int]:
    if path is None:
        yield asyncio.subprocess.DEVNULL
        return
    with path.open("rb") as file:
        yield file.fileno()


async def _kill_all(process: asyncio.subprocess.Process, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(kill_marked, mark)
    await process.wait()


def kill_marked(mark: str) -> None:
    """Kill all processes of this user that have `mark` in their environment."""
    wanted = mark.encode()
    for _ in range(KILL_ROUNDS):  # a process may be forking
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
            except OSError:
                continue
        if not found:
            return


async def _read_into(reader: asyncio.StreamReader, log: OutputLog) -> None:
    while data := await reader.read(READ_BYTES):
        log.write(data)
