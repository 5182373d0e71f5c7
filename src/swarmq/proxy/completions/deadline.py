"""Time limit of a model call: one timer, however often a stream waits for its next token."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from swarmq.proxy.http_errors import DeadlineError


class Deadline:
    """Time limit of a model call, for the task that created it. Put `with deadline:` around every wait: it raises DeadlineError when
    the time is over.

    Nothing is cancelled between two waits, so an async generator may yield there. Call `close` at the end.
    """

    def __init__(self, began: float, timeout_s: float) -> None:
        """`began`: time in seconds on the monotonic clock at which the call began."""
        self._timeout_s = timeout_s
        task = asyncio.current_task()
        assert task
        self._task = task
        self._waiting = self._passed = False
        left_s = max(began + timeout_s - time.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._pass)

    def __enter__(self) -> None:
        if self._passed:
            raise self._error()
        self._waiting = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._waiting = False
        # As in asyncio.timeout: if another party cancelled the task as well, CancelledError is raised.
        if self._passed and not self._task.uncancel() and kind is asyncio.CancelledError:
            raise self._error() from error

    def close(self) -> None:
        self._timer.cancel()

    def _pass(self) -> None:
        self._passed = True
        if self._waiting:
            self._task.cancel()

    def _error(self) -> DeadlineError:
        return DeadlineError(f"the answer took longer than {self._timeout_s:g} s")
