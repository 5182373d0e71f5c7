"""JSON over HTTP with the standard library: uses proxies from the environment and accepts a private certificate authority.

Calls block; use `run_in_thread` on an event loop.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from swarmq.errors import SwarmqError

PROBE_TIMEOUT_S = 5.0
"""Time limit in seconds of requests that only ask whether a server answers."""
CONNECT_TIMEOUT_S = 10.0
"""Time limit in seconds for a connection. The answer may take longer, but a host that answers at all accepts connections at once."""


class HttpError(SwarmqError):
    """A request without an answer, or with an error as answer. `status` is 0 without an answer; `fault` has the fields of swarmq's own
    errors (`message`, `param`, `code`)."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        retry_after_s: float | None = None,
        fault: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.fault = fault or {}

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
    with open_url(request, timeout_s=timeout_s, ca=ca) as answer:
        if on_headers is not None:
            on_headers(answer.headers)
        return read_json(answer)


@contextmanager
def open_url(
    request: urllib.request.Request,
    *,
    timeout_s: float | None,
    ca: bytes = b"",
    socket_file: Path | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """Send the request and provide the answer, which may be read in pieces. `timeout_s`: maximum seconds between two pieces; `socket_file`: where the server listens, if not at the URL.

    Raises HttpError, also if the connection breaks while the answer is read.
    """
    url = request.full_url
    handlers = (
        [_SocketFileHandler(socket_file), urllib.request.ProxyHandler({})]
        if socket_file
        else [_HttpHandler(), _HttpsHandler(_make_ssl_context(url, ca))]
    )
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(4000)
            raise HttpError(
                f"{url} answered {error.code}: {_read_error_message(body)}",
                status=error.code,
                retry_after_s=_parse_seconds(error.headers.get("Retry-After")),
                fault=_read_fault(body),
            ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        hint = (
            "; is its host up, and does a firewall drop packets to this port?"
            if isinstance(reason, TimeoutError)
            else ""
        )
        raise HttpError(f"{url} cannot be reached ({reason}){hint}") from error


def read_json(answer: http.client.HTTPResponse) -> Any:
    """Return the decoded answer. Raises HttpError if it is no JSON."""
    try:
        return msgspec.json.decode(answer.read())
    except msgspec.MsgspecError as error:
        raise HttpError(f"{answer.url} did not answer with JSON: {error}", status=502) from error


class _SocketFileConnection(http.client.HTTPConnection):
    def __init__(self, host: str, /, *, socket_file: Path, **options: Any) -> None:
        super().__init__(host, **options)
        self._socket_file = socket_file

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._socket_file))


class _SocketFileHandler(urllib.request.HTTPHandler):
    """Connects to a socket file, whatever the URL's host."""

    def __init__(self, socket_file: Path) -> None:
        super().__init__()
        self._socket_file = socket_file

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_SocketFileConnection, socket_file=self._socket_file), request)


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


class _Connection(http.client.HTTPConnection):
    """A connection that is opened within CONNECT_TIMEOUT_S."""

    def connect(self) -> None:
        answer_s, self.timeout = self.timeout, CONNECT_TIMEOUT_S
        super().connect()
        self.sock.settimeout(answer_s)


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    """The same by TLS."""


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._tls = context

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, req, context=self._tls)


def _make_ssl_context(url: str, ca: bytes) -> ssl.SSLContext | None:
    return ssl.create_default_context(cadata=ca or None) if url.startswith("https:") else None


def _read_error_message(body: bytes) -> str:
    return str(_read_fault(body).get("message") or body.decode(errors="replace").strip()[:300])


def _read_fault(body: bytes) -> dict[str, Any]:
    """Return the fields of an error in the form of OpenAI's API, which swarmq's servers share; {} for other errors."""
    try:
        return msgspec.json.decode(body, type=dict[str, dict[str, Any]])["error"]
    except (msgspec.MsgspecError, KeyError):
        return {}


def _parse_seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdecimal() else None
