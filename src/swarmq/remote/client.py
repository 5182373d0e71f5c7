"""Requests to the daemon of a host: over HTTP with a token, or over ssh to its socket file."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from swarmq.client.episodes.http import HttpError, open_url
from swarmq.errors import ConfigError, HostError
from swarmq.remote.records import HostView, PlanView, RunView
from swarmq.remote.tunnel import SshTunnel

TOKEN_ENV = "SWARMQ_TOKEN"  # noqa: S105 - the name of a variable
SCHEMES = ("http", "https", "ssh")
ANSWER_S = 120.0
"""Seconds that an answer may take; that to a change comes after those of the learners."""
PATIENCE_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0

T = TypeVar("T")


class HostClient:
    """A host that takes jobs (`swarmq host serve`).

    All requests may be repeated without harm, so each is sent again when the daemon is away for a moment.
    """

    def __init__(self, host: str, *, token: str | None = None, patience_s: float = PATIENCE_S) -> None:
        """`host`: `http://HOST:PORT`, `https://HOST:PORT` or `ssh://[USER@]HOST[:PORT][/FOLDER]`, where FOLDER is the one that the daemon
        serves, by default `runs` in the user's home. `token`: an operator token, which ssh does not need; None:
        `$SWARMQ_TOKEN`. `patience_s`: seconds for which a daemon may be away.

        Raises ConfigError for a malformed address, and HostError if ssh does not reach the host.
        """
        parts = urlsplit(host)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ConfigError(f"host {host!r}: write it as http://HOST:PORT, https://HOST:PORT or ssh://HOST")
        self.address = host
        self._token = token or os.environ.get(TOKEN_ENV)
        self._patience_s = patience_s
        self.tunnel = SshTunnel(host) if parts.scheme == "ssh" else None
        self._base = "http://host" if self.tunnel else host.rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostClient({self.address!r})"

    def close(self) -> None:
        """End the ssh tunnel, if there is one."""
        if self.tunnel:
            self.tunnel.close()

    def show(self) -> HostView:
        """Return what the host has, runs and has queued."""
        return self.ask("GET", "/v1/host", HostView)

    def runs(self) -> list[RunView]:
        """Return all runs of the host, in the order of their launches."""
        return self.ask("GET", "/v1/runs", list[RunView])

    def check(self, job: Mapping[str, Any], *, gpus: int | None = None) -> PlanView:
        """Return how the host would place a job. Raises HostError if it would refuse the launch."""
        return self.ask("POST", "/v1/check", PlanView, body={"job": job, "gpus": gpus})

    def ask(
        self, method: str, path: str, answer: type[T], *, body: Any = None, timeout_s: float = ANSWER_S, **query: Any
    ) -> T:
        """Send a request and return its answer, converted. Raises HostError."""
        pause_s, until = FIRST_PAUSE_S, time.monotonic() + self._patience_s
        while True:
            try:
                with self._open(method, path, body, timeout_s, query) as response:
                    raw = response.read()
                return msgspec.json.decode(raw, type=answer) if raw else msgspec.convert(None, answer)
            except HttpError as error:
                away = error.status in (0, 502, 503, 504) and not error.fault
                if not away or time.monotonic() > until:
                    raise self._map(error) from error
            except msgspec.MsgspecError as error:
                raise HostError(f"{self.address}: not the answer of a swarmq host: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def stream(
        self, path: str, *, body: Any = None, timeout_s: float | None = ANSWER_S, **query: Any
    ) -> Iterator[bytes]:
        """Yield the pieces of an answer as they come. With a `body`, the request is a POST. Raises HostError."""
        try:
            with self._open("GET" if body is None else "POST", path, body, timeout_s, query) as response:
                while piece := response.read1(1 << 16):
                    yield piece
        except HttpError as error:
            raise self._map(error) from error

    def _map(self, error: HttpError) -> HostError:
        fault = error.fault
        message = str(fault.get("message") or error)
        if error.status == 401 and not self._token:
            message = f"no token: give one with --token or ${TOKEN_ENV}; `swarmq host token` on the host prints one"
        if error.status == 0:
            message += "; is `swarmq host serve` up there?"
        return HostError(
            f"{self.address}: {message}", status=error.status, code=fault.get("code"), param=fault.get("param")
        )

    @contextmanager
    def _open(
        self, method: str, path: str, body: Any, timeout_s: float | None, query: Mapping[str, Any]
    ) -> Iterator[Any]:
        given = {name: value for name, value in query.items() if value is not None}
        url = f"{self._base}{quote(path)}{'?' if given else ''}{urlencode(given)}"
        headers = {"Authorization": f"Bearer {self._token}"} if self._token and not self.tunnel else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - checked in __init__
        socket_file = self.tunnel.socket if self.tunnel else None
        with open_url(request, timeout_s=timeout_s, socket_file=socket_file) as response:
            yield response
