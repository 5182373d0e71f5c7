"""An ssh tunnel to a host's daemon: a socket file on this machine that the system's `ssh -L` connects to the daemon's.

    this machine: DIR/socket <── ssh -L ──> host: FOLDER/.host/socket

The daemon's socket file can be opened by its user alone, so ssh as that user needs no token. The ssh process runs `cat` on the host, which
ends with its standard input: the tunnel ends with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swarmq.errors import HostError
from swarmq.runtime.processes import find_free_port

SSH_ENV = "SWARMQ_SSH"
"""Variable with the ssh command and further options for it, e.g. `ssh -i key`."""
DEFAULT_FOLDER = "~/runs"
OPTIONS = ("-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15")


class SshTunnel:
    """A tunnel to the socket file of a host's daemon; open until `close`."""

    def __init__(self, url: str) -> None:
        """`url`: `ssh://[USER@]HOST[:PORT][/FOLDER]`. Raises HostError if ssh does not reach the host or no daemon has served the folder."""
        parts = urlsplit(url)
        port = ["-p", str(parts.port)] if parts.port else []
        self._target = [*port, f"{unquote(parts.username)}@{parts.hostname}" if parts.username else str(parts.hostname)]
        self._address = url
        self._folder = tempfile.TemporaryDirectory(prefix="swarmq-ssh-")
        self.socket = Path(self._folder.name) / "socket"
        self._sessions = contextlib.ExitStack()
        self._finalizer = weakref.finalize(self, _close, self._sessions, self._folder)
        path = unquote(parts.path)
        remote = self._find_socket(path.removeprefix("/") if path.startswith("/~") else path or DEFAULT_FOLDER)
        self._open(f"{self.socket}:{remote}")

    def close(self) -> None:
        """End the ssh processes."""
        self._finalizer()

    def forward(self, host: str, port: int) -> int:
        """Return a port of this machine that leads to a port as the other host reaches it. Raises HostError."""
        own = find_free_port()
        self._open(f"127.0.0.1:{own}:{host}:{port}")
        return own

    def _find_socket(self, folder: str) -> str:
        """Return the path of the daemon's socket file on the host; a path that begins with `~` is one in the user's home."""
        own = folder.removeprefix("~").removeprefix("/")
        place = f'"$HOME"/{shlex.quote(own)}' if folder.startswith("~") else shlex.quote(folder)
        done = subprocess.run(
            [*_command(), *self._target, f"cd {place}/.host && pwd -P"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HostError(
                f"{self._address}: {done.stderr.strip() or f'ssh ended with status {done.returncode}'}; the daemon's folder is expected "
                f"at {folder} there (`swarmq host serve` makes it), and ssh://HOST/FOLDER names another"
            )
        return f"{done.stdout.strip()}/socket"

    def _open(self, forwarded: str) -> None:
        session = subprocess.Popen(
            [*_command(), "-T", *OPTIONS, "-L", forwarded, *self._target, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._sessions.callback(_end, session)
        assert session.stdin
        assert session.stdout
        with contextlib.suppress(BrokenPipeError):
            session.stdin.write(b"\n")
            session.stdin.flush()
        if not session.stdout.readline():
            _, errors = session.communicate()
            raise HostError(f"{self._address}: {errors.decode(errors='replace').strip() or 'ssh has ended'}")


def _command() -> Sequence[str]:
    return shlex.split(os.environ.get(SSH_ENV, "")) or ("ssh",)


def _end(session: subprocess.Popen[bytes]) -> None:
    session.kill()
    session.communicate()


def _close(sessions: contextlib.ExitStack, folder: tempfile.TemporaryDirectory[str]) -> None:
    sessions.close()
    folder.cleanup()
