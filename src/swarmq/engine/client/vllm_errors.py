"""Readable errors for engines that cannot be reached or refuse a request."""

from __future__ import annotations

import ast
import os
import re
from typing import Any

import aiohttp

from swarmq.engine.auth import SECRET_ENV
from swarmq.errors import EngineError

VALIDATION_ERRORS = re.compile(r"\A\d+ validation errors?:\n +(\{.*)")
"""Pattern of vLLM's error for an invalid body, with one dict per line."""
PYDANTIC_ERRORS = re.compile(
    r"\A\d+ validation errors? for [^\n]+\n(?P<loc>[^\n]+)\n +(?P<msg>.*?)(?: \[type=(?P<type>\w+)|\Z)", re.DOTALL
)
"""Pattern of pydantic's own error text."""
CODES = {"missing": "missing_required_parameter"}


def make_secret_error(url: str) -> EngineError:
    """Return the error for an engine that rejects the caller's secret."""
    return EngineError(
        f"the engine at {url} requires another secret than this run's: start it with ${SECRET_ENV} set to what "
        "`swarmq engine secret RUN` prints"
    )


def map_connection_error(url: str, error: aiohttp.ClientError | OSError) -> EngineError:
    """Map a connection error of aiohttp or the system to an EngineError."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return EngineError(
            f"the engine at {url} cannot be reached: nothing answered in time; is its host up, and does a firewall drop packets to this port?"
        )
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    why = str(cause) or type(cause).__name__
    if isinstance(cause, OSError) and cause.errno:
        why = os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or why
    what = f"nothing answers there ({why})" if cause is not error else why
    return EngineError(f"the engine at {url} cannot be reached: {what}; is vLLM running, and is the url right?")


def parse_refusal(message: str, param: str | None) -> tuple[str, str | None, str]:
    """Return an engine's objection as one sentence, the field at fault in OpenAI's notation, and an error code.

    vLLM lists all errors that pydantic found; only the first is returned.
    """
    found = _parse_first_error(message)
    if found is None:
        return message, _format_path(param) if param else None, "invalid_value"
    where, why, kind = _format_path(str(found.get("loc") or param or "")), str(found.get("msg")), str(found.get("type"))
    why = why.removeprefix("Value error, ").strip()
    code = CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    return (f"{where}: {why}" if where else why), where or None, code


def _parse_first_error(message: str) -> dict[str, Any] | None:
    if (listed := VALIDATION_ERRORS.match(message)) is not None:
        line = listed[1]
        try:
            found = ast.literal_eval(line)
        except (
            ValueError,
            SyntaxError,
            MemoryError,
            RecursionError,
        ):  # the text was cut, or a path was removed from it
            parts = {name: re.search(rf"'{name}': (?:'([^']*)'|\"([^\"]*)\")", line) for name in ("loc", "msg", "type")}
            return {name: part[1] or part[2] for name, part in parts.items() if part}
        return found if isinstance(found, dict) else None
    dumped = PYDANTIC_ERRORS.match(message)
    return dumped.groupdict() if dumped else None


def _format_path(loc: str) -> str:
    """Convert `body.messages.0.content` to `messages[0].content`, without the names of pydantic's union members."""
    parts = [
        part for part in loc.removeprefix("body.").split(".") if part and not part[0].isupper() and "[" not in part
    ]
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts if part != "body").lstrip(".")
