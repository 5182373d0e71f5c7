"""A local HTTP endpoint for the model calls of one episode, for programs that know neither the run's certificate nor its keys.

    agent ──any path, any dialect──> 127.0.0.1:PORT ──the episode's key──> proxy
      ^──────────── bytes as they come ────────────┘ (counted: calls, answers, refusals; whole answers are listed as received)

One port serves one episode, so the port says which episode a call belongs to. A connection carries one request: the relay asks
both sides to close it, and passes everything after the request's head on as it comes, in both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import msgspec

from swarmq.client.episodes.episode import Handle
from swarmq.client.episodes.received_answers import CALL_ID, BodyObserver, ReceivedAnswers
from swarmq.messages import OBSERVED_HEADER

MAX_HEAD_BYTES = 65_536
READ_BYTES = 65_536
LINGER_S = 2.0
"""Seconds that a refused agent gets to send the rest of its request and to close its connection."""
SAMPLED = ("/chat/completions", "/completions", "/responses", "/messages")
"""Suffixes of paths that ask the model for an answer."""
_DROPPED = frozenset(
    {"authorization", "x-api-key", "host", "connection", "keep-alive", "upgrade", "expect", "accept-encoding"}
)
_GONE = (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError, TimeoutError)


class ModelCall(msgspec.Struct, kw_only=True):
    """One request of the agent for an answer of the model."""

    path: str
    status: int = 0
    """HTTP status; 0 if the proxy was not reached."""
    detail: str = ""
    """Beginning of the answer's body if the status is an error, or why the proxy was not reached."""
    is_whole: bool = False
    """Whether the whole answer was passed on."""
    agent_left: bool = False
    """Whether the agent closed its connection before the answer's end."""

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.is_whole

    @property
    def failed_by_infrastructure(self) -> bool:
        """Whether neither agent nor policy is to blame that there is no answer."""
        if self.agent_left or self.is_answered:
            return False
        return self.status in (0, 200, 408, 429) or self.status >= 500


class EpisodeRelay:
    """The endpoint of one episode; `async with EpisodeRelay.open(...)` serves it."""

    def __init__(self, ep: Handle, *, any_key: bool) -> None:
        upstream = urlsplit(ep.base_url)
        self._host, self._tls = upstream.hostname or "", None
        self._port = upstream.port or (443 if upstream.scheme == "https" else 80)
        self._netloc, self._prefix = upstream.netloc, upstream.path.rstrip("/").removesuffix("/v1")
        if upstream.scheme == "https":
            self._tls = ssl.create_default_context(cadata=ep.ca or None)
        self._base_url, self._key, self._any_key = ep.base_url, ep.api_key, any_key
        self._received: ReceivedAnswers = ep.received
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.calls: list[ModelCall] = []
        """Requests for an answer, in the order in which they ended."""
        self.other_paths: dict[str, int] = {}
        """`METHOD path` of requests that are not for an answer -> status of the last one."""
        self.refused_keys = 0
        """Number of requests that were refused because they carried another key."""
        self.first_call = asyncio.Event()
        """Event that is set by the first request for an answer."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, ep: Handle, *, port: int = 0, any_key: bool = False) -> AsyncIterator[EpisodeRelay]:
        """Serve an episode on 127.0.0.1.

        `port`: 0 for any free port. `any_key`: accept requests without the episode's key, for agents that cannot be told one;
        every process of this machine may then use the episode. Raises OSError if the port is taken.
        """
        relay = cls(ep, any_key=any_key)
        server = await asyncio.start_server(relay._accept, "127.0.0.1", port, limit=MAX_HEAD_BYTES)
        relay.port = server.sockets[0].getsockname()[1]
        try:
            yield relay
        finally:
            server.close()
            for task in relay._connections:
                task.cancel()
            await asyncio.gather(*relay._connections, return_exceptions=True)

    @property
    def base_url(self) -> str:
        """URL for OpenAI clients; ends in `/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def num_answered(self) -> int:
        return sum(call.is_answered for call in self.calls)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(*_GONE):
                await self._serve(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            await _refuse(reader, writer, 431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes")
            return
        first, headers = _parse_head(head)
        method, _, rest = first.partition(" ")
        target = rest.rpartition(" ")[0]
        path = urlsplit(target).path
        call = ModelCall(path=path) if method == "POST" and path.endswith(SAMPLED) else None
        if not (self._any_key or _read_key(headers) == self._key):
            self.refused_keys += 1
            await _refuse(
                reader, writer, 401,
                "the request does not carry the key of this episode, which is in the environment variables; for an agent that "
                "cannot be told a key, give `swarmq run` the option --any-key",
            )  # fmt: skip
            return
        if call:
            self.first_call.set()
        try:
            await self._forward(method, target, headers, reader, writer, call)
        finally:
            if call:
                self.calls.append(call)

    async def _forward(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        call: ModelCall | None,
    ) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=MAX_HEAD_BYTES
            )
        except (OSError, ssl.SSLError) as error:
            why = f"the proxy at {self._netloc} cannot be reached: {error}"
            if call:
                call.detail = why
            await _refuse(reader, writer, 503, why)
            return
        try:
            kept = [(name, value) for name, value in headers if name.lower() not in _DROPPED]
            marked = [(OBSERVED_HEADER, "1")] if call and self._received.mark_request(self._base_url) else []
            if any(name.lower() == "expect" for name, _ in headers):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            sent = [
                ("host", self._netloc),
                ("connection", "close"),
                ("authorization", f"Bearer {self._key}"),
                *marked,
                *kept,
            ]
            up_writer.write(_format_head(f"{method} {self._prefix}{target} HTTP/1.1", sent))
            asking = asyncio.create_task(_copy(reader, up_writer))
            answering = asyncio.create_task(self._answer(up_reader, writer, call, f"{method} {urlsplit(target).path}"))
            try:
                await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done() and call:
                    call.agent_left = True
            finally:
                for task in (asking, answering):
                    task.cancel()
                _, failure = await asyncio.gather(asking, answering, return_exceptions=True)
                if call and not call.status and isinstance(failure, Exception):
                    call.detail = f"the proxy at {self._netloc} did not answer: {type(failure).__name__}: {failure}"
        finally:
            up_writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: ModelCall | None, asked: str
    ) -> None:
        """Pass the proxy's answer on to the agent. Record its status in `call` or, for a request that is not a model call, under its
        `METHOD path` (`asked`)."""
        status_line, headers = _parse_head(await _read_head(reader))
        status = int(status_line.split(" ", 2)[1])
        kept = [(name, value) for name, value in headers if name.lower() not in ("connection", "keep-alive")]
        by_name = {name.lower(): value for name, value in headers}
        body = _Body(by_name)
        if call:
            call.status = status
        else:
            self.other_paths[asked] = status
        calls = tuple(one.strip() for one in by_name.get(CALL_ID, "").split(",") if one)
        is_events = by_name.get("content-type", "").startswith("text/event-stream")
        observer = (
            BodyObserver(self._received, calls, is_events=is_events) if call and calls and status == 200 else None
        )
        try:
            writer.write(_format_head(status_line, [*kept, ("connection", "close")]))
            while not body.has_ended and (chunk := await reader.read(READ_BYTES)):
                writer.write(chunk)
                await writer.drain()
                content = body.take(chunk)
                if observer:
                    observer.take(content)
                elif call and len(call.detail) < 300:
                    call.detail += content.decode(errors="replace")[:300]
            if not body.is_whole:
                raise ConnectionError("the proxy closed the connection within its answer")
        except (OSError, asyncio.CancelledError):
            if observer and not observer.is_complete:
                observer.fail()
            raise
        else:
            if observer:
                observer.end()
        finally:
            if call:
                call.is_whole = observer.is_complete if observer else body.is_whole


class _Body:
    """Reads the framing of a body: yields its content, and knows when it is whole."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length", "")
        self._left = int(length) if length.isdecimal() and not self._chunked else None
        self._buffer = b""
        self._in_chunk = 0
        self._is_last = False

    @property
    def has_ended(self) -> bool:
        """Whether the framing says that nothing follows. The end of the connection may come later than the agent's own."""
        return self._is_last if self._chunked else self._left == 0

    @property
    def is_whole(self) -> bool:
        """Whether the connection may end here: without any framing, its end is the body's."""
        return self.has_ended or (self._left is None and not self._chunked)

    def take(self, data: bytes) -> bytes:
        if not self._chunked:
            if self._left is not None:
                self._left = max(0, self._left - len(data))
            return data
        content, self._buffer = b"", self._buffer + data
        while self._buffer and not self._is_last:
            if self._in_chunk > 2:
                piece = self._buffer[: self._in_chunk - 2]
                content += piece
                self._buffer, self._in_chunk = self._buffer[len(piece) :], self._in_chunk - len(piece)
            elif self._in_chunk:  # the line end after a chunk
                cut = self._buffer[: self._in_chunk]
                self._buffer, self._in_chunk = self._buffer[len(cut) :], self._in_chunk - len(cut)
            else:
                line, end, rest = self._buffer.partition(b"\r\n")
                if not end:
                    break
                self._buffer = rest
                size = int(line.partition(b";")[0], 16)
                self._is_last, self._in_chunk = size == 0, size + 2
        return content


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith((b"HTTP/1.1 100", b"HTTP/1.0 100")):
            return head


def _parse_head(head: bytes) -> tuple[str, list[tuple[str, str]]]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, [(name.strip(), value.strip()) for name, _, value in pairs]


def _format_head(first: str, headers: list[tuple[str, str]]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")


def _read_key(headers: list[tuple[str, str]]) -> str:
    by_name = {name.lower(): value for name, value in headers}
    scheme, _, key = by_name.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else by_name.get("x-api-key", "")


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, message: str) -> None:
    """Answer with an error, and read the rest of the request: a connection closed with unread bytes loses the answer."""
    body = msgspec.json.encode(
        {"error": {"message": message, "type": "invalid_request_error", "code": None, "param": None}}
    )
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    writer.write(_format_head(f"HTTP/1.1 {status} Refused", headers) + body)
    await writer.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read(READ_BYTES):
                pass
