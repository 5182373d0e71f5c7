"""Limits for connections: slow clients time out, and idle connections are evicted at capacity.

  connected ──head in time──> asked ──body in time──> answered ──read in time──┐
    ▲ └──late──> 408, closed  └──late──> closed           └──late──> closed    │
    └──────────────────────────────── kept open for the next one ──────────────┘

Above the largest number of connections, the one that has waited longest for a request is closed to admit the newest; if each
has a request in work, the newest gets a 503.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from swarmq.proxy.completions.answer_receipts import HAS_LEFT
from swarmq.proxy.http_errors import Refusal

MAX_HEAD_BYTES = 64 * 1024
BODY_GRACE = 2.0
"""Factor of the body's time limit outside the agents' routes, which time out by themselves with 408."""
LINGER_S = 5.0
"""Seconds for a final response to be read."""
OWN_FILES = 256
"""Upper bound of the proxy's open files besides its connections."""
MAX_IDLE_CONNECTIONS = 1024
"""Number of idle connections that are kept open beyond those with a call."""


class ConnectionLimits:
    """The connections of a proxy and their limits."""

    def __init__(self, *, most: int, receive_s: float, keep_s: float, read_s: float) -> None:
        """`most`: maximum number of connections. `receive_s`: seconds in which a head must arrive, and then a body. `keep_s`: seconds that a connection may wait for
        its next request. `read_s`: seconds that a client may go without reading."""
        self.most = most
        self.receive_s, self.keep_s, self.read_s = receive_s, keep_s, read_s
        self.inside: set[Connection] = set()
        self.waiting: OrderedDict[Connection, None] = OrderedDict()
        """Connections without a request, the longest waiting first."""

    def enter(self, connection: Connection) -> bool:
        """Admit a connection, evicting another one if necessary. Returns whether there is room."""
        if len(self.inside) >= self.most and self.waiting:
            next(iter(self.waiting)).leave()
        if len(self.inside) >= self.most:
            return False
        self.inside.add(connection)
        return True

    def protocol(self) -> type[Connection]:
        """Return the protocol class with which uvicorn handles connections."""
        return type("DoorConnection", (Connection,), {"door": self})


class Connection(HttpToolsProtocol):
    door: ConnectionLimits
    _timer: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _begun = False
    """Whether a request has begun to arrive."""
    _lost = _broken = False
    """Whether the connection is over, and whether it broke, so that the last bytes may not have left."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.door.enter(self):
            self._await_request(self.door.receive_s)
        else:
            self._refuse(
                503, "Service Unavailable", "the proxy has as many connections as it takes", "proxy_overloaded"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._broken |= exc is not None
        self._forget()
        self._set_timer(None)
        self._set_reading(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self.door.waiting and self._begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                why = f"the head of a request may have at most {MAX_HEAD_BYTES} bytes"
                self._refuse(431, "Request Header Fields Too Large", why, "headers_too_large")

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._begun, self._head_bytes = False, 0
        self.door.waiting.pop(self, None)
        self._set_timer(BODY_GRACE * self.door.receive_s)
        super().on_headers_complete()
        self.scope[HAS_LEFT] = partial(self._has_left, self.cycle)  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        if not self.cycle.response_complete:
            self._set_timer(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request has already begun
            self._await_request(self.door.keep_s + self.door.receive_s)

    def pause_writing(self) -> None:
        self._set_reading(self.door.read_s)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._set_reading(None)
        super().resume_writing()

    def eof_received(self) -> None:
        self._broken |= bool(self.cycle) and not self.cycle.response_complete
        super().eof_received()

    def leave(self) -> None:
        """Close an idle connection to make room for others."""
        self._forget()
        self._end()

    def _await_request(self, seconds: float) -> None:
        if not self.transport.is_closing():
            self.door.waiting[self] = None
            self._set_timer(seconds)

    def _late(self) -> None:
        if self._begun:
            why = f"the head of the request did not arrive within {self.door.receive_s:g} s"
            self._refuse(408, "Request Timeout", why, "request_timeout")
        else:
            self.leave()

    def _refuse(self, status: int, reason: str, message: str, code: str) -> None:
        """Write an error response to a client whose request is incomplete, and close the connection."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = msgspec.json.encode(Refusal(status=status, message=message, type=kind, code=code).body)
        again = b"retry-after: 2\r\n" if status == 503 else b""
        self.transport.write(
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n".encode()
            + again + b"connection: close\r\n\r\n" + body
        )  # fmt: skip
        self.leave()

    def _end(self) -> None:
        self._set_timer(None)
        self.transport.close()
        self.loop.call_later(LINGER_S, self._abort)

    def _abort(self) -> None:
        if not self._lost:
            self._broken = True
            self.transport.abort()

    def _has_left(self, cycle: RequestResponseCycle) -> bool | None:
        """Return whether the whole answer has left for the agent's host; None while it is on its way."""
        if self.cycle is not cycle:
            return True  # the agent has sent its next request, so it has this answer
        if self._broken or not cycle.response_complete:
            return False
        if self._lost:
            return True
        is_waiting = (
            self.transport.is_closing()
            or self.transport.get_write_buffer_size()
            or _count_unacknowledged(self.transport)
        )
        return None if is_waiting else True

    def _forget(self) -> None:
        self.door.inside.discard(self)
        self.door.waiting.pop(self, None)

    def _set_timer(self, seconds: float | None) -> None:
        self._timer = self._restart_timer(self._timer, seconds, self._late)

    def _set_reading(self, seconds: float | None) -> None:
        self._reading = self._restart_timer(self._reading, seconds, self._abort)

    def _restart_timer(
        self, before: asyncio.TimerHandle | None, seconds: float | None, then: Callable[[], None]
    ) -> asyncio.TimerHandle | None:
        if before:
            before.cancel()
        return None if seconds is None else self.loop.call_later(seconds, then)


def _count_unacknowledged(transport: asyncio.Transport) -> int:
    """Return the bytes that the other host has not acknowledged; 0 if the system does not say."""
    try:
        waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except (OSError, AttributeError):
        return 0
    return int.from_bytes(waiting, sys.byteorder)


def max_connections(files: int, *, calls: int) -> int:
    """Return how many client connections fit into `files` open files if each of `calls` also has a connection to an engine."""
    return min(calls + MAX_IDLE_CONNECTIONS, max((files - OWN_FILES) // 2, 1))
