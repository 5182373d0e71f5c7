"""Record of the answers that an agent received, observed inside the HTTP library that the agent uses.

    request with an episode's key ──> marked `x-swarmq-observed` ──> answer read to its end ──> listed in the episode's end

A recorded turn does not prove that its answer arrived, because the proxy may have died before the last byte. The end of an
episode therefore lists the answers that arrived, and of the marked calls the collector trains exactly these. Watched are httpx
and httpx2 (used by the clients of OpenAI, Anthropic and LiteLLM), and unstreamed answers of requests and aiohttp, if the agent
has loaded them. Calls of other libraries and processes are not marked: for them, the proxy reports whether they were answered.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from email.message import Message
from typing import Any
from urllib.parse import urlsplit

from swarmq.messages import OBSERVED_HEADER
from swarmq.runtime.logs import log

CALL_ID = "x-swarmq-call-id"
OVERRIDDEN = "x-swarmq-overridden"
END_OF_CHOICE = re.compile(rb'"finish_reason":"|"type":"(?:message_delta|response\.completed|response\.incomplete)"')
"""Pattern that occurs once per complete choice of a stream, and never in the model's text, in which quotes are escaped."""
MAX_MARK_BYTES = 64
STREAMED = re.compile(rb'"stream"\s*:\s*true')

_lock = threading.Lock()
_open: dict[str, ReceivedAnswers] = {}
"""API key -> observer of its answers."""
_watched: set[str] = set()
"""Names of the libraries that are already watched."""
_logged_overrides: set[str] = set()
"""Values of the header OVERRIDDEN that were logged, so that each is logged once."""


class ReceivedAnswers:
    """The model calls of one episode whose answers arrived in this process. Any thread or event loop may add calls."""

    def __init__(self, base_url: str) -> None:
        self._host = urlsplit(base_url).netloc
        self._pid = os.getpid()
        self._calls: set[str] = set()
        self._unread: list[tuple[tuple[str, ...], Callable[[], bool]]] = []
        self._is_marked = False
        self.other_host = ""
        """Host to which the episode's key was sent instead of the proxy."""

    def calls(self) -> tuple[str, ...] | None:
        """Return the ids of the calls whose answers arrived, or None if no call was watched."""
        self._collect_read()
        return tuple(sorted(self._calls)) if self._is_marked else None

    def mark_request(self, url: str) -> bool:
        """Return whether answers to requests to this URL are recorded here, so that the caller must mark its request. From the first such
        request on, `calls` returns a tuple instead of None.

        Answers to requests of forked processes are not recorded, because those could not report to this one.
        """
        host = urlsplit(url).netloc
        if host != self._host:
            self.other_host = host
        is_watched = host == self._host and os.getpid() == self._pid
        self._is_marked |= is_watched
        return is_watched

    def add(self, calls: tuple[str, ...]) -> None:
        self._calls.update(calls)

    def remove(self, calls: tuple[str, ...]) -> None:
        self._calls.difference_update(calls)

    def add_when(self, calls: tuple[str, ...], is_read: Callable[[], bool]) -> None:
        """Add the calls as soon as `is_read` returns true; it is called whenever the received calls are listed."""
        self._collect_read()
        self._unread.append((calls, is_read))

    def _collect_read(self) -> None:
        for entry in list(self._unread):
            calls, is_read = entry
            if is_read():
                self._calls.update(calls)
                self._unread.remove(entry)


def watch(api_key: str, received: ReceivedAnswers) -> None:
    """Record answers to requests with this key in `received`, until `unwatch`."""
    _open[api_key] = received
    watch_libraries()


def unwatch(api_key: str) -> None:
    _open.pop(api_key, None)


def watch_libraries() -> None:
    """Watch every known library that is loaded by now."""
    for name, start in LIBRARIES.items():
        if name not in _watched and name in sys.modules:
            with _lock:
                if name not in _watched and start(sys.modules[name]):
                    _watched.add(name)


def _find_observer(headers: Mapping[str, str], url: str) -> ReceivedAnswers | None:
    """Return the observer for a request of a watched episode, or None."""
    if not _open:
        return None
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    received = _open.get(key)
    return received if received and received.mark_request(url) else None


def warn_of_overridden_sampling(headers: Mapping[str, str] | Message) -> None:
    """Log, once per process and value, which of the agent's sampling parameters the run overrides; few agents read the header."""
    overridden = headers.get(OVERRIDDEN)
    if overridden and overridden not in _logged_overrides:
        _logged_overrides.add(overridden)
        log.warning(
            "sampling_overridden",
            overridden=overridden,
            reason="the run's policies.*.sampling takes precedence, and the engine's context length limits max_tokens",
        )


def observe_own_request(api_key: str, url: str) -> tuple[dict[str, str], Callable[[Message], None]]:
    """Observe a request made by swarmq itself: return the headers to add, and a function to call with the answer's headers."""
    received = _find_observer({"authorization": f"Bearer {api_key}"}, url)

    def record_answer(headers: Message) -> None:
        calls = _read_call_ids(200, headers)
        if received:
            received.add(calls)

    return {OBSERVED_HEADER: "1"} if received else {}, record_answer


def _read_call_ids(status: int, headers: Mapping[str, str] | Message) -> tuple[str, ...]:
    """Return the call ids in an answer's headers, one for each choice; empty for an error."""
    warn_of_overridden_sampling(headers)
    return tuple(name.strip() for name in headers.get(CALL_ID, "").split(",") if name) if status == 200 else ()


class BodyObserver:
    """Observer of a body on its way to the agent.

    A body counts as received at its end without an error; an event stream, at the end of every choice.
    """

    def __init__(self, received: ReceivedAnswers, calls: tuple[str, ...], *, is_events: bool) -> None:
        self._received, self._calls, self._is_events = received, calls, is_events
        self._tail = b""
        self._ended = 0
        self.is_complete = False
        """Whether the whole answer was seen."""

    def take(self, chunk: bytes) -> None:
        if not self._is_events:
            return
        seen = self._tail + chunk
        last = 0
        for found in END_OF_CHOICE.finditer(seen):
            self._ended += 1
            last = found.end()
        self._tail = seen[max(last, len(seen) - MAX_MARK_BYTES) :]
        if self._ended >= len(self._calls):
            self._complete()

    def end(self) -> None:
        if not self._is_events:
            self._complete()

    def fail(self) -> None:
        self.is_complete = False
        self._received.remove(self._calls)

    def _complete(self) -> None:
        self.is_complete = True
        self._received.add(self._calls)


def _watch_httpx(httpx: Any) -> bool:
    if not hasattr(httpx, "AsyncClient"):  # the import has not finished
        return False

    class ObservedStream(httpx.SyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, body: BodyObserver) -> None:
            self._inner, self._body = inner, body

        def __iter__(self) -> Iterator[bytes]:
            try:
                for chunk in self._inner:
                    self._body.take(chunk)
                    yield chunk
            except Exception:
                self._body.fail()
                raise
            self._body.end()

        def close(self) -> None:
            self._inner.close()

    class AsyncObservedStream(httpx.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, body: BodyObserver) -> None:
            self._inner, self._body = inner, body

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in self._inner:
                    self._body.take(chunk)
                    yield chunk
            except Exception:
                self._body.fail()
                raise
            self._body.end()

        async def aclose(self) -> None:
            await self._inner.aclose()

    def begin(request: Any) -> ReceivedAnswers | None:
        received = _find_observer(request.headers, str(request.url))
        if received:
            request.headers[OBSERVED_HEADER] = "1"
        return received

    def end(received: ReceivedAnswers, response: Any, wrap: type, *, is_read: bool) -> None:
        calls = _read_call_ids(response.status_code, response.headers)
        if not calls:
            return
        body = BodyObserver(received, calls, is_events=_is_events(response.headers))
        if is_read:
            body.take(response.content)
            body.end()
        else:
            response.stream = wrap(response.stream, body)

    sync_send, async_send = httpx.Client.send, httpx.AsyncClient.send

    @functools.wraps(sync_send)
    def send(self: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
        received = begin(request)
        response = sync_send(self, request, stream=stream, **options)
        if received:
            end(received, response, ObservedStream, is_read=not stream)
        return response

    @functools.wraps(async_send)
    async def async_send_observed(self: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
        received = begin(request)
        response = await async_send(self, request, stream=stream, **options)
        if received:
            end(received, response, AsyncObservedStream, is_read=not stream)
        return response

    httpx.Client.send, httpx.AsyncClient.send = send, async_send_observed
    return True


def _watch_requests(requests: Any) -> bool:
    if not hasattr(requests, "Session"):
        return False
    original = requests.Session.send

    @functools.wraps(original)
    def send(self: Any, request: Any, **options: Any) -> Any:
        is_whole = not options.get("stream", self.stream)
        received = _find_observer(request.headers, request.url) if is_whole else None
        if received:
            request.headers[OBSERVED_HEADER] = "1"
        response = original(self, request, **options)
        if received and not _is_events(response.headers):
            received.add(_read_call_ids(response.status_code, response.headers))
        return response

    requests.Session.send = send
    return True


def _watch_aiohttp(aiohttp: Any) -> bool:
    if not hasattr(aiohttp, "ClientSession"):
        return False
    from multidict import CIMultiDict  # noqa: PLC0415 - comes with aiohttp

    original = aiohttp.ClientSession._request  # noqa: SLF001 - all its methods call it

    @functools.wraps(original)
    async def request(self: Any, method: str, url: Any, **options: Any) -> Any:
        headers = CIMultiDict(self.headers)
        headers.update(options.get("headers") or {})
        values, body = options.get("json"), options.get("data") or b""
        if body == b"":
            is_whole = not (isinstance(values, Mapping) and values.get("stream"))
        else:
            is_whole = not STREAMED.search(_to_bytes(body))
        received = _find_observer(headers, str(url)) if is_whole and OBSERVED_HEADER not in headers else None
        if received:
            options["headers"] = {**headers, OBSERVED_HEADER: "1"}
        response = await original(self, method, url, **options)
        if (
            received
            and not _is_events(response.headers)
            and (calls := _read_call_ids(response.status, response.headers))
        ):
            received.add_when(calls, response.content.at_eof)
        return response

    aiohttp.ClientSession._request = request  # noqa: SLF001
    return True


def _to_bytes(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else b'"stream":true'


def _is_events(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").startswith("text/event-stream")


LIBRARIES: dict[str, Callable[[Any], bool]] = {
    "httpx": _watch_httpx,
    "httpx2": _watch_httpx,
    "requests": _watch_requests,
    "aiohttp": _watch_aiohttp,
}
