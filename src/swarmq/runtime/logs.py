"""Logging: one line per event, as JSON in files, as coloured text on a terminal, or as sentences for commands.

A line for which the disk has no room is lost, and the process goes on. Code that waits for disk space logs each wait.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn, TextIO, cast

from swarmq.runtime.terminal import visible


class Logger:
    """structlog's logger "swarmq", imported when the first line is logged, so that clients without log lines start faster."""

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        import structlog  # noqa: PLC0415 - see the class

        with contextlib.suppress(OSError):
            getattr(structlog.get_logger("swarmq"), level)(event, **_escape_fields(fields))


log = Logger()


class LossyStream:
    """A text stream whose writes never fail: text beyond a full disk stays in the buffer, or is lost when the buffer is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive_full_disk() -> None:
    """Keep output to a full disk, also tracebacks, from ending this process or changing its exit status."""
    sys.stdout, sys.stderr = (
        cast("TextIO", LossyStream(stream)) if stream else stream for stream in (sys.stdout, sys.stderr)
    )


def configure(*, role: str, run: str, level: int = logging.INFO) -> None:
    """Set up structlog for a daemon; called once, by the process's entry point. Each line is one write."""
    import structlog  # noqa: PLC0415 - see Logger

    survive_full_disk()
    on_terminal = sys.stderr.isatty()
    last = [_escape, structlog.dev.ConsoleRenderer()] if on_terminal else [structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, run=run)


def write_lines_whole() -> None:
    """Write each log line at once, for processes that share a terminal or file: with `python -u`, structlog's default writes a line
    in two pieces, between which lines of other processes may come. An existing structlog configuration is kept."""
    import structlog  # noqa: PLC0415 - see Logger

    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.WriteLoggerFactory())


@contextlib.contextmanager
def redirect_to(say: Callable[[str], None]) -> Iterator[None]:
    """Pass this process's log lines, as sentences, to `say` and nowhere else while the context is open."""
    import structlog  # noqa: PLC0415 - see Logger

    def pass_on(_logger: Any, level: str, fields: MutableMapping[str, Any]) -> NoReturn:
        say(_sentence(level, fields))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.format_exc_info, pass_on],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _escape(_logger: Any, _level: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return _escape_fields(fields)


def _escape_fields(fields: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return the fields with control characters in texts made visible. Other values are printed by their repr."""
    return {name: visible(value) if isinstance(value, str) else value for name, value in fields.items()}


def _sentence(level: str, fields: MutableMapping[str, Any]) -> str:
    fields = _escape_fields(fields)
    event = str(fields.pop("event")).replace("_", " ")
    facts = ", ".join(f"{name} {value}" for name, value in fields.items())
    return ("" if level == "info" else f"{level}: ") + event + (f": {facts}" if facts else "")
