"""A TCP relay between a client and a server, and the faults of a bad wire.

client ──> relay ──> server
           │ cut         both sides are reset at once
           │ hold        nothing passes, nothing closes: a black hole; `release` lets it go on
           │ half-open   only answers (or only requests) are swallowed
           └ cut_after   reset after N more bytes towards the server, in the middle of a frame if need be
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from enum import Flag, auto

CHUNK_BYTES = 64 * 1024


class Way(Flag):
    """Direction of bytes."""

    REQUESTS = auto()
    ANSWERS = auto()
    BOTH = REQUESTS | ANSWERS


class TcpRelay:
    """`async with TcpRelay.to(host, port) as relay:` listens on `relay.port` of 127.0.0.1."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = {Way.REQUESTS: asyncio.Event(), Way.ANSWERS: asyncio.Event()}
        self._left_bytes: int | None = None
        self._refusing = False
        self.port = 0
        self.connections = 0
        """Number of connections relayed so far."""
        self.release()

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, host: str, port: int, *, own_port: int = 0) -> AsyncIterator[TcpRelay]:
        """Relay to `host`:`port`. `own_port`: port to listen on; 0: a free one."""
        relay = cls(host, port)
        server = await asyncio.start_server(relay._serve, "127.0.0.1", own_port)
        relay.port = server.sockets[0].getsockname()[1]
        try:
            yield relay
        finally:
            server.close()
            relay.cut()
            for task in relay._tasks:
                task.cancel()
            await asyncio.gather(*relay._tasks, return_exceptions=True)
            await server.wait_closed()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection. With `refuse`, reset new ones as well until `release`."""
        self._refusing = refuse
        for writer in self._writers:
            writer.transport.abort()

    def cut_after(self, size_bytes: int) -> None:
        """Reset every connection after `size_bytes` more bytes have gone to the server."""
        self._left_bytes = size_bytes

    def hold(self, way: Way = Way.BOTH) -> None:
        """Hold back the bytes of one direction or both until `release`, without losing any."""
        for direction in way:
            self._open[direction].clear()

    def release(self) -> None:
        """Let all bytes pass again."""
        self._refusing = False
        self._left_bytes = None
        for gate in self._open.values():
            gate.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            if self._refusing:
                writer.transport.abort()
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers |= {writer, far_writer}
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, far_writer, Way.REQUESTS))
                    group.create_task(self._pump(far_reader, writer, Way.ANSWERS))
            finally:
                self._writers -= {writer, far_writer}
                far_writer.transport.abort()
        except* OSError:
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await self._open[way].wait()
            if way is Way.REQUESTS and self._left_bytes is not None:
                chunk, self._left_bytes = chunk[: self._left_bytes], self._left_bytes - len(chunk)
            writer.write(chunk)
            await writer.drain()
            if self._left_bytes is not None and self._left_bytes <= 0:
                self._left_bytes = None
                self.cut()
        writer.close()
