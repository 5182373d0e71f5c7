"""JSON over HTTP with the standard library: uses proxies from the environment and accepts a private certificate authority.

Calls block; use `run_in_thread` on an event loop.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from swarmq.errors import SwarmqError

PROBE_TIMEOUT_S = 5.0
"""Time limit in seconds of requests that only ask whether a server answers."""


class HttpError(SwarmqError):
    """A request without an answer, or with an error as answer. `status` is 0 without an answer."""

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 408, 425, 429) or self.status >= 500


def post_json(
    url: str,
    body: Any,
    *,
    token: str,
    timeout_s: float,
    headers: dict[str, str] | None = None,
    ca: bytes = b"",
    on_headers: Callable[[Message], None] | None = None,
) -> Any:
    """Return the decoded JSON answer; `on_headers` is called with its headers. Raises HttpError with the server's message."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}", **(headers or {})}
    request = urllib.request.Request(url, msgspec.json.encode(body), headers, method="POST")  # noqa: S310 - from the invite
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=_make_ssl_context(url, ca)) as answer:  # noqa: S310
            if on_headers is not None:
                on_headers(answer.headers)
            return msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            raise HttpError(
                f"{url} answered {error.code}: {_read_error_message(error.read(4000))}",
                status=error.code,
                retry_after_s=_parse_seconds(error.headers.get("Retry-After")),
            ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise HttpError(f"{url} cannot be reached ({reason})") from error
    except msgspec.MsgspecError as error:
        raise HttpError(f"{url} did not answer with JSON: {error}", status=502) from error


def is_reachable(url: str, ca: bytes = b"") -> bool:
    """Return whether a GET request succeeds within PROBE_TIMEOUT_S."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S, context=_make_ssl_context(url, ca)) as answer:  # noqa: S310 - from the invite
            return bool(answer.status < http.client.BAD_REQUEST)
    except (OSError, http.client.HTTPException):  # HTTPError is an OSError
        return False


def fetch_date(url: str, ca: bytes = b"") -> float | None:
    """Return the server's clock as Unix time, also from an error page; None without an answer within PROBE_TIMEOUT_S or without
    a date."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S, context=_make_ssl_context(url, ca)) as answer:  # noqa: S310 - from the invite
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        with error:
            date = error.headers.get("Date")
    except (OSError, http.client.HTTPException, ValueError):
        return None
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None


def _make_ssl_context(url: str, ca: bytes) -> ssl.SSLContext | None:
    return ssl.create_default_context(cadata=ca or None) if url.startswith("https:") else None


def _read_error_message(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
        return str(answer["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:300]


def _parse_seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdecimal() else None
