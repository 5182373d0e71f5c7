"""Display of running episodes: a bar on a terminal, otherwise an occasional line; each traceback is shown once."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from swarmq.client.episodes.tracebacks import format_agent_traceback, is_user_file, skip_swarmq_frames
from swarmq.client.runners.attempts import AttemptResult
from swarmq.client.runners.report import Tally, format_reward, summarize_error
from swarmq.runtime.logs import log
from swarmq.runtime.terminal import console, visible
from swarmq.runtime.wording import count_of

if TYPE_CHECKING:
    from rich.progress import Progress

MAX_DISTINCT = 100
"""Maximum number of different tracebacks that are shown."""


class Display:
    """Display of progress; call `update` after each attempt. With `shown=False`, only tracebacks appear."""

    def __init__(self, label: str, *, total: int | None, shown: bool, interval_s: float) -> None:
        """`interval_s`: seconds between two log lines where there is no terminal."""
        self._label = label
        self._total = total
        self._bar = _make_progress_bar() if shown and sys.stderr.isatty() else None
        self._lines = shown and self._bar is None
        self._interval_s = interval_s
        self._next_line = time.monotonic() + interval_s
        self._seen: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            self._row = self._bar.add_task(self._label, total=self._total, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        for where, times in self._seen.items():
            if times > 1:
                self._print(f"swarmq: {count_of(times - 1, 'more time')}: {where}")

    def update(self, tally: Tally, attempted: AttemptResult) -> None:
        if attempted.error is not None:
            self._show_error(attempted, attempted.error)
        if self._bar:
            self._bar.update(self._row, completed=tally.slots, figures=_format_figures(tally))
        elif self._lines and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._interval_s
            total = {} if self._total is None else {"total": self._total}
            reward = {} if tally.reward_mean is None else {"reward_mean": format_reward(tally.reward_mean)}
            log.info("progress", of=self._label, slots=tally.slots, **total, **reward, failed=tally.failed)

    def _show_error(self, attempted: AttemptResult, error: BaseException) -> None:
        where = locate_failure(error)
        if where in self._seen or len(self._seen) < MAX_DISTINCT:
            self._seen[where] += 1
        if self._seen[where] == 1:
            self._print(
                f"swarmq: task {attempted.task_id!r}, attempt {attempted.attempt + 1}: {describe_failure(error)}"
            )

    def _print(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text, highlight=False)
        else:
            print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - for the person who wrote the agent


def describe_failure(error: BaseException) -> str:
    """Return the traceback of an agent's error, or only its message if the error is swarmq's own complaint about the agent."""
    if skip_swarmq_frames(error) is None and error.__cause__ is None:
        return str(error)
    return f"the agent raised\n{format_agent_traceback(error).rstrip()}"


def locate_failure(error: BaseException) -> str:
    """Return type and line of an error, in the user's code if possible. Equal for tracebacks with the same cause."""
    frames = traceback.extract_tb(skip_swarmq_frames(error))
    if not frames:
        return summarize_error(error)
    deepest = next((frame for frame in reversed(frames) if is_user_file(frame.filename)), frames[-1])
    entry = f" (called from line {frames[0].lineno})" if deepest is not frames[0] else ""
    return f"{type(error).__name__} at {deepest.filename}:{deepest.lineno}{entry}"


def _format_figures(tally: Tally) -> str:
    mean = "" if tally.reward_mean is None else f"reward {format_reward(tally.reward_mean)}"
    failed = f"  failed {tally.failed}" if tally.failed else ""
    return mean + failed


def _make_progress_bar() -> Progress:
    from rich.progress import (  # noqa: PLC0415 - only where somebody looks
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=console(stderr=True))
