"""Small facts about processes and ports that every part which starts one needs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from swarmq.errors import SetUpError

FINAL_MESSAGE_PREFIX = "swarmq: "
"""Begins the line in which a process of ours says why it ends."""
_PR_SET_PDEATHSIG = 1
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 20_000
_TRIES = 100
_MOST_HELD = 64
_held: deque[int] = deque()
"""Descriptors of sockets, closed by the end of the process."""


class DeathCounter:
    """How often a process has died lately."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._at: list[float] = []

    def record_death(self) -> int:
        """It died just now. How many deaths that makes within the window."""
        now = time.monotonic()
        self._at = [at for at in self._at if at > now - self._window_s] + [now]
        return len(self._at)


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """For `preexec_fn`: a session of its own, ended with a signal when the thread that started it ends.

    Ctrl-C on a terminal therefore reaches the parent alone, which stops its children in order. Where the system
    has no such call (anything but Linux) children outlive a parent that was killed.
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)


def find_free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listened on a moment ago. Where there is one, it is none of those that the system hands out:
    before its user binds it, any connection that somebody opens could be given one of them."""
    with contextlib.suppress(OSError, ValueError):
        beyond = int(_HANDED_OUT.read_text().split()[0])
        for _ in range(_TRIES):
            port = _LOWEST_PORT + secrets.randbelow(beyond - _LOWEST_PORT)
            if is_port_free(port, host):
                return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def reserve_port(host: str = "127.0.0.1") -> int:
    """As `free_port`, for a server of ours that takes its time to start: nobody else gets the port in the meantime.

    A socket stays bound to it without listening: the system gives the port to no other, nor does this function in another
    process, yet servers that reuse addresses, as nearly all do, bind beside it. Where that is refused (anything but
    Linux), the port is no more than free.
    """
    with socket.socket() as holder, socket.socket() as server:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        port = int(holder.getsockname()[1])
        try:
            server.bind((host, port))
            server.listen()
        except OSError:
            return find_free_port(host)
        _held.append(holder.detach())
    if len(_held) > _MOST_HELD:
        os.close(_held.popleft())
    return port


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def exit_status_for(errors: Iterable[BaseException]) -> int:
    """Of a process that ends with these: one that says that to start it again is of no use, or 1."""
    return os.EX_CONFIG if any(isinstance(error, SetUpError) for error in errors) else 1


def read_final_message(path: Path, start: int) -> str:
    """What a process of ours said of why it ended, in a log that it has written to from byte `start` on; empty: nothing."""
    try:
        with path.open("rb") as log:
            log.seek(start)
            said = (line.decode(errors="replace") for line in log if line.startswith(FINAL_MESSAGE_PREFIX.encode()))
            return next(said, "").removeprefix(FINAL_MESSAGE_PREFIX).strip()
    except OSError:
        return ""


def read_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log file, for an error message; empty when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 64 * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def find_children(pid: int, title: str) -> dict[int, str]:
    """Child of the process -> its title, of those whose begins like this; none where the system does not tell (anything but Linux)."""
    found = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                name = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
                if name.startswith(title):
                    found[child] = name
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that has ended and that nobody has asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def stop_group(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    """SIGTERM to the process, SIGKILL to its whole session when it is still there after `grace_s`."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
