"""The dashboard under /dashboard of a proxy: a mount that forwards requests to a process, which the first request starts.

    browser ──> proxy: /dashboard/... ── bytes ──> socket file ──> python -m swarmq.dashboard.serving (low priority)

Reading a run takes processor time and memory; in the proxy's process it would delay every agent. Tokens are checked in the other
process, which has the same secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import structlog
from litestar.enums import ScopeType
from litestar.handlers import ASGIRouteHandler, asgi
from litestar.types import Receive, Scope, Send
from yarl import URL

from swarmq.config import SwarmJob
from swarmq.dashboard.access import HEADERS
from swarmq.dashboard.process_settings import BASE, READY, DashboardProcessSettings

NEEDED = ("numpy", "tokenizers", "zstandard")
"""Packages that the dashboard needs beyond those of a proxy."""
START_S = 30.0
STOP_S = 3.0
MAX_BODY = 64 * 1024
OF_ONE_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"date", b"server"}
)
"""Headers of an answer that are not passed on, because they concern one connection alone."""

log = structlog.get_logger()


class DashboardMount:
    """The pages of one run, and the process that makes them."""

    def __init__(self, job: SwarmJob, folder: Path, *, installed: Callable[[str], object]) -> None:
        """`folder`: an empty folder for the socket. `installed`: returns None for a package that is not installed."""
        self._settings = DashboardProcessSettings(
            run=job.run,
            folder=str(job.run_folder.path.resolve()),
            socket=str(folder / "socket"),
            is_secure=bool(job.proxy.certificate),
        )
        self._missing = [name for name in NEEDED if installed(name) is None]
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.handlers: Sequence[ASGIRouteHandler] = [asgi(BASE, is_mount=True, copy_scope=True)(self.answer)]

    def finish(self) -> None:
        """End the answers that do not end by themselves (event streams), because the proxy stops. May be called by a signal
        handler."""
        self._loop.call_soon_threadsafe(self._ending.set)

    async def close(self) -> None:
        """End the process and close the connections to it."""
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the process, and its answer back."""
        if scope["type"] == ScopeType.WEBSOCKET:
            return
        path = bytes(scope["raw_path"]).partition(BASE.encode())[2].decode("latin-1")
        if self._missing:
            line = f"not installed: {', '.join(self._missing)}; pip install 'swarmq[dashboard]' where the proxy runs\n"
            await _send_text(send, 503, line)
            return
        if not path:
            await _send_text(send, 307, "", location=f"{BASE.removeprefix('/')}/")
            return
        try:
            await self._start()
        except OSError as error:
            log.warning("dashboard_not_started", reason=str(error))
            await _send_text(send, 503, "the dashboard's process could not be started; the proxy's log says why\n")
            return
        body = await _read_body(receive)
        query = bytes(scope["query_string"]).decode("latin-1")
        url = URL(f"http://dashboard{path}{'?' if query else ''}{query}", encoded=True)
        passing = asyncio.ensure_future(self._pass(str(scope["method"]), url, _request_headers(scope), body, send))
        waits = [
            passing,
            asyncio.ensure_future(_wait_for_disconnect(receive)),
            asyncio.ensure_future(self._ending.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            results = await asyncio.gather(*waits, return_exceptions=True)
        if isinstance(results[0], Exception):
            log.warning("dashboard_failed", reason=repr(results[0]))
            if not isinstance(results[0], AnswerBegunError):
                await _send_text(send, 502, "the dashboard's process does not answer; try again\n")

    async def _start(self) -> None:
        """Start the process if it does not run. Raises OSError."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            await asyncio.to_thread(Path(self._settings.socket).unlink, missing_ok=True)
            argument = msgspec.json.encode(self._settings).decode()
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "swarmq.dashboard.serving", argument, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            async with asyncio.timeout(START_S):  # a TimeoutError is an OSError
                line = await process.stdout.readline()
            if line.strip() != READY.encode():
                raise OSError(f"the dashboard's process ended with status {await process.wait()}")
            if self._session is None:
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(path=self._settings.socket),
                    timeout=aiohttp.ClientTimeout(total=None),
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                )

    async def _pass(self, method: str, url: URL, headers: list[tuple[str, str]], body: bytes, send: Send) -> None:
        assert self._session is not None
        async with self._session.request(
            method,
            url,
            headers=headers,
            data=body or None,
            allow_redirects=False,
            skip_auto_headers=("accept-encoding", "user-agent"),
        ) as response:
            passed = [
                (name.lower(), value) for name, value in response.raw_headers if name.lower() not in OF_ONE_CONNECTION
            ]
            await send({"type": "http.response.start", "status": response.status, "headers": passed})
            try:
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except aiohttp.ClientError as error:
                raise AnswerBegunError(str(error)) from error
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class AnswerBegunError(Exception):
    """The process failed in the middle of an answer."""


@asynccontextmanager
async def open_pages(
    job: SwarmJob, *, installed: Callable[[str], object] = importlib.util.find_spec
) -> AsyncIterator[DashboardMount]:
    """Open the dashboard's mount for a proxy. Its process ends with the context."""
    with tempfile.TemporaryDirectory(prefix="swarmq-dashboard-") as folder:
        mount = DashboardMount(job, Path(folder), installed=installed)
        try:
            yield mount
        finally:
            await mount.close()


def _request_headers(scope: Scope) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in OF_ONE_CONNECTION and name != b"content-length"
    ]


async def _read_body(receive: Receive) -> bytes:
    """Return the request's body; of one that is too large, enough for the other process to refuse it."""
    body = b""
    while len(body) <= MAX_BODY:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    return body


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_text(send: Send, status: int, text: str, **headers: str) -> None:
    every = {"content-type": "text/plain; charset=utf-8", **HEADERS, **headers}
    start = [(name.encode(), value.encode()) for name, value in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": text.encode(), "more_body": False})
