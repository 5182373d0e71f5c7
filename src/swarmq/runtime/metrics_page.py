"""A page of metrics for Prometheus, served by collector and learner on a port of their own. The proxy serves its page itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from swarmq.errors import SwarmqError
from swarmq.runtime.logs import log

REQUEST_S = 5.0
"""Time limit in seconds for a request to arrive completely."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.asynccontextmanager
async def serve_metrics(host: str, port: int, make_page: Callable[[], bytes]) -> AsyncIterator[None]:
    """Serve `GET /metrics` while the context is open. Port 0 serves nothing.

    Metrics never stop a process: a port that cannot be listened on costs one warning.
    """
    async with contextlib.AsyncExitStack() as stack:
        if port:
            try:
                server = await asyncio.start_server(_answer_with(make_page), host, port)
            except OSError as error:
                log.warning("metrics_not_served", address=f"{host}:{port}", reason=str(error))
            else:
                stack.callback(server.close)
                log.info("metrics_served", url=f"http://{host}:{port}/metrics")
        yield


def _answer_with(
    make_page: Callable[[], bytes],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_respond(head, make_page))
                await writer.drain()
        writer.close()

    return answer


def _respond(head: bytes, make_page: Callable[[], bytes]) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", b"only GET\n")
    if path != b"/metrics":
        return _response("404 Not Found", b"see /metrics\n")
    try:
        page = make_page()
    except SwarmqError as error:
        return _response("503 Service Unavailable", f"{error}\n".encode())
    return _response("200 OK", page if method == b"GET" else b"")


def _response(status: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
