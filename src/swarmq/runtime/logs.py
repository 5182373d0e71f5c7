"""One line per event, as JSON in files and coloured text on a terminal, or in the words of whoever talks to a person there; ids come
from context.

A line that its disk has no room for is lost, and nobody dies of it: whoever waits for room says so, every time.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn, TextIO, cast

from swarmq.runtime.terminal import visible


class Logger:
    """structlog's logger of the name "swarmq", loaded with the first line: a client that has nothing to say starts faster."""

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        import structlog  # noqa: PLC0415 - see the class

        with contextlib.suppress(OSError):
            getattr(structlog.get_logger("swarmq"), level)(event, **_shown(fields))


log = Logger()


class LossyStream:
    """A stream that never fails: what it cannot write is kept as far as there is room in its buffer, and else lost."""

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
    """From here on nothing that this process prints can end it or change its exit status, tracebacks included."""
    sys.stdout, sys.stderr = (
        cast("TextIO", LossyStream(stream)) if stream else stream for stream in (sys.stdout, sys.stderr)
    )


def configure(*, role: str, run: str, level: int = logging.INFO) -> None:
    """Set up structlog for a daemon. Called once, by the process's entry point. A line is written at one go."""
    import structlog  # noqa: PLC0415 - see Logger

    survive_full_disk()
    last = [_show, structlog.dev.ConsoleRenderer()] if sys.stderr.isatty() else [structlog.processors.JSONRenderer()]
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
    """For one of several processes that print to the same place: without this, Python's `-u` has a line written in two pieces,
    and others in between. Whoever has set structlog up keeps what they chose."""
    import structlog  # noqa: PLC0415 - see Logger

    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.WriteLoggerFactory())


@contextlib.contextmanager
def redirect_to(say: Callable[[str], None]) -> Iterator[None]:
    """While the context is open the lines of this process's log go to `say`, as sentences, and nowhere else."""
    import structlog  # noqa: PLC0415 - see Logger

    def tell(_logger: Any, level: str, fields: MutableMapping[str, Any]) -> NoReturn:
        say(_sentence(level, fields))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.format_exc_info, tell],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _show(_logger: Any, _level: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return _shown(fields)


def _shown(fields: MutableMapping[str, Any]) -> dict[str, Any]:
    """The fields, with control characters in their texts made visible; anything else is printed by its repr."""
    return {name: visible(value) if isinstance(value, str) else value for name, value in fields.items()}


def _sentence(level: str, fields: MutableMapping[str, Any]) -> str:
    fields = _shown(fields)
    event = str(fields.pop("event")).replace("_", " ")
    facts = ", ".join(f"{name} {value}" for name, value in fields.items())
    return ("" if level == "info" else f"{level}: ") + event + (f": {facts}" if facts else "")
