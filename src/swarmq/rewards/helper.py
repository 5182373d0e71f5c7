"""Helper processes for checks that an answer could stall: mathematics, patterns, schemas.

    thread --request--> idle helper (or a new one) --"expected is usable"--> --verdict--> thread, helper idle again
                           └─ killed by the kernel after `timeout_s` of its CPU time, or for want of memory:
                              before "usable" the task is at fault (RewardError), after it the answer (score 0)

A limit on CPU time gives the same verdict on a busy machine. Timeouts by signals work in the main thread alone, and a thread
cannot be stopped. Helpers end with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from swarmq.errors import MissingExtraError, RewardError
from swarmq.rewards.score import Score

WALL_FACTOR = 30.0
"""Multiple of its limit of CPU time after which a silent helper cannot be computing: the machine is overloaded or suspended."""
MIN_WALL_S = 60.0
MEMORY_BYTES = 2 * 1024**3
MAX_IDLE = 4

Check = Literal["math", "regex", "schema"]


class _Helper:
    """One helper process, used by one thread at a time."""

    def __init__(self) -> None:
        # Started by its path, because `-m` would import this whole package in each helper.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("helper_process.py")), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is ours to handle
        )
        self._buffer = b""

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> tuple[str, Any, int]:
        """Return the last stage that the helper reported ("", "usable" or "done"), its verdict, and its exit status if it died."""
        came = ""
        deadline = time.monotonic() + max(MIN_WALL_S, WALL_FACTOR * timeout_s)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            while True:
                reply = json.loads(self._read_line(deadline))
                if reply != {"usable": True}:
                    return "done", reply, 0
                came = "usable"
        except (OSError, ValueError):
            self.close()
            return came, None, self._process.returncode
        except BaseException:
            self.close()
            raise

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(left_s, 0.0))
            if not ready:
                raise TimeoutError
            if not (more := os.read(self._process.stdout.fileno(), 65536)):
                self._process.wait()
                raise BrokenPipeError
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # bytes that a dead helper did not take
                pipe.close()


_lock = threading.Lock()
_idle: list[_Helper] = []
_owner = os.getpid()


def check_in_helper(check: Check, expected: Mapping[str, Any], answer: str, *, timeout_s: float) -> Score:
    """Return the score of an answer. Raises RewardError for an unusable expectation and MissingExtraError for a package that is
    not installed."""
    if not timeout_s > 0:
        raise RewardError(f"timeout_s is {timeout_s:g}: give seconds above 0")
    request = {"check": check, "expected": dict(expected), "answer": answer, "timeout_s": timeout_s}
    helper = _take()
    came, reply, status = helper.ask(request, timeout_s)
    if came != "done":
        if status == -signal.SIGXCPU and came == "usable":
            return Score(0.0, f"the check took more than {timeout_s:g} s of CPU time")
        if came == "usable" and status not in (0, -signal.SIGKILL, -signal.SIGTERM):
            return Score(0.0, "the check ran out of memory")
        cause = (
            f"took more than {timeout_s:g} s of CPU time"
            if status == -signal.SIGXCPU
            else f"ended with status {status}"
        )
        raise RewardError(f"the helper process of {check} checks {cause}{'' if came else ' at the expected answer'}")
    _give_back(helper)
    if "missing" in reply:
        raise MissingExtraError(f"{check} checks need {reply['missing']}: pip install 'swarmq[rewards]'")
    if "unusable" in reply:
        raise RewardError(reply["unusable"])
    return Score(float(reply["score"]), reply["reason"])


def _take() -> _Helper:
    global _owner  # noqa: PLW0603 - helpers belong to the process that started them
    with _lock:
        if _owner != os.getpid():
            _idle.clear()
            _owner = os.getpid()
        if _idle:
            return _idle.pop()
    try:
        return _Helper()
    except OSError as error:
        raise RewardError(f"a helper process cannot be started: {error}") from error


def _give_back(helper: _Helper) -> None:
    with _lock:
        if len(_idle) < MAX_IDLE:
            _idle.append(helper)
            return
    helper.close()


@atexit.register
def close_helpers() -> None:
    """End the idle helper processes; later checks start new ones."""
    with _lock:
        helpers, _idle[:] = list(_idle) if _owner == os.getpid() else [], []
    for helper in helpers:
        helper.close()
