"""Children that run in a peer's environment: started with a log, watched step by step, ended with all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

POLL_S = 0.01
GRACE_S = 10.0
KEPT_LINES = 200
PR_SET_CHILD_SUBREAPER = 36
"""Option number in Linux's prctl.h."""


class PeerError(RuntimeError):
    """A peer's process that ended too early or took too long; the message ends with the last lines of its log."""


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own until the block ends, with which all of its descendants end."""
    before = psutil.Process().children(recursive=True)
    _adopt_orphans(True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process, before)
            _adopt_orphans(False)


def wait_for_lines(
    process: subprocess.Popen[bytes], steps: Path, count: int, *, deadline: float, log: Path, least: int | None = None
) -> list[float]:
    """Return when each of the first `count` lines of `steps` appeared, in seconds of time.monotonic.

    From the deadline (in the same clock) on, `least` lines are enough; all are needed when that is None. Raises PeerError
    when there are fewer, or when the process ends before the last line.
    """
    appeared: list[float] = []
    least = count if least is None else least
    while len(appeared) < count:
        running, late = process.poll() is None, time.monotonic() > deadline
        lines = steps.read_bytes().count(b"\n") if steps.exists() else 0
        appeared += [time.monotonic()] * (lines - len(appeared))
        if late and len(appeared) >= least:
            break
        if len(appeared) < count and (late or not running):
            why = "at the deadline" if running else f"when it ended with code {process.returncode}"
            raise PeerError(f"{len(appeared)} of {count} steps {why}; {tail(log, 40)}")
        time.sleep(POLL_S)
    return appeared[:count]


def tail(log: Path, lines: int = KEPT_LINES) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _adopt_orphans(adopted: bool) -> None:
    """Begin, or cease, to adopt descendants whose own parent ends, so that they can be found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopted))


def _end(process: subprocess.Popen[bytes], before: Sequence[psutil.Process]) -> None:
    """End a process by SIGTERM, then kill all that began after it: servers of Ray and vLLM outlive their parents."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, GRACE_S)
