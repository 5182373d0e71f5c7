"""Starting, watching and stopping of processes, and choice of their ports."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from swarmq.errors import ConfigError, SetUpError

FINAL_MESSAGE_PREFIX = "swarmq: "
"""Prefix of the log line in which a swarmq process says why it ends."""
MAX_OPEN_FILES = 65_536
"""Maximum number of files that a process may open: RabbitMQ's Erlang reserves memory for each, and some hosts allow a
thousand million."""

_PR_SET_PDEATHSIG = 1
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 20_000
_TRIES = 100
_MOST_HELD = 64
_held: deque[int] = deque()
"""Sockets of reserved ports, closed when the process ends."""
_found: deque[int] = deque(maxlen=1_000)
"""Latest ports that this process was told to be free. They are not told again, because a caller may not have bound them yet."""


class DeathCounter:
    """Counter of a process's deaths within a sliding window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._at: list[float] = []

    def record_death(self) -> int:
        """Record a death at the present time and return the number of deaths within the window."""
        now = time.monotonic()
        self._at = [at for at in self._at if at > now - self._window_s] + [now]
        return len(self._at)


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Make this process the leader of a new session, and let Linux send it the signal `by` when its parent thread ends; for
    `preexec_fn`.

    Ctrl-C on a terminal then reaches the parent alone, which stops its children in order. Outside Linux, children outlive a
    parent that was killed.
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)


def find_free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free at present, outside the system's ephemeral range if possible.

    A port of the ephemeral range could be given to any outgoing connection before the caller binds it.
    """
    with contextlib.suppress(OSError, ValueError):
        beyond = int(_HANDED_OUT.read_text().split()[0])
        for _ in range(_TRIES):
            port = _LOWEST_PORT + secrets.randbelow(beyond - _LOWEST_PORT)
            if port not in _found and is_port_free(port, host):
                _found.append(port)
                return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def reserve_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port and keep it from other processes until a slowly starting server binds it.

    A socket stays bound to the port without listening. The system then gives the port to nobody else, but a server that reuses
    addresses, as nearly all do, can still bind it. Where that is refused (outside Linux), the port is only free at present.
    """
    family = _family(host)
    with socket.socket(family) as holder, socket.socket(family) as server:
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
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def listen(host: str, port: int, *, backlog: int, setting: str, advice: str = "choose another") -> socket.socket:
    """Return a socket that listens on the address. Raises a ConfigError that names `setting` and ends with `advice` if that
    is not possible."""
    # By this protocol number asyncio knows to send small packets at once; without it every answer waits 40 ms.
    listener = socket.socket(_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{setting}: {host}:{port} cannot be listened on ({error.strerror}); {advice}") from error
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def raise_file_limit() -> int:
    """Raise this process's limit of open files, which shells set to 1,024, as far as the host allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems promise more than they give
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of this file."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def exit_status_for(errors: Iterable[BaseException]) -> int:
    """Return the exit status of a process that ends with these errors: EX_CONFIG if a restart is of no use, else 1."""
    return os.EX_CONFIG if any(isinstance(error, SetUpError) for error in errors) else 1


def read_final_message(path: Path, start: int) -> str:
    """Return why a swarmq process ended, as it says in its log after byte `start`, or "" if it says nothing."""
    try:
        with path.open("rb") as log:
            log.seek(start)
            messages = (line.decode(errors="replace") for line in log if line.startswith(FINAL_MESSAGE_PREFIX.encode()))
            return next(messages, "").removeprefix(FINAL_MESSAGE_PREFIX).strip()
    except OSError:
        return ""


def read_tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log file, or "" if it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 64 * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def find_children(pid: int, title: str) -> dict[int, str]:
    """Return process id -> title of the children whose title begins with `title`; outside Linux always empty."""
    found = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                name = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
                if name.startswith(title):
                    found[child] = name
    return found


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def stop_group(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    """Terminate the process, and kill its whole session if it still runs after `grace_s`."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
