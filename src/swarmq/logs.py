"""One line per event, as JSON in files and coloured text on a terminal; ids come from context."""

from __future__ import annotations

import logging
import sys
from typing import Any


class Logger:
    """structlog's logger of the name "swarmq", loaded with the first line: a client that has nothing to say starts faster."""

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        import structlog  # noqa: PLC0415 - see the class

        getattr(structlog.get_logger("swarmq"), level)(event, **fields)


log = Logger()


def configure(*, role: str, run: str, level: int = logging.INFO) -> None:
    """Set up structlog for a daemon. Called once, by the process's entry point."""
    import structlog  # noqa: PLC0415 - see Logger

    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, run=run)
