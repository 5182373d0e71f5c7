"""One line per event, as JSON in files and coloured text on a terminal; ids come from context."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(*, role: str, run: str, level: int = logging.INFO) -> None:
    """Set up structlog for a daemon. Called once, by the process's entry point."""
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
