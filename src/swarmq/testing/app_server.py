"""A uvicorn server in the caller's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn


class AppServer(uvicorn.Server):
    """Server that says when it listens, stops on request, and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stop = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self.on_tick(0)  # answers have a date from here on
        self.listening.set()

    async def main_loop(self) -> None:
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_app(config: uvicorn.Config, *, port: int = 0) -> AsyncIterator[int]:
    """Serve on a port of 127.0.0.1 while the context is open, and provide the port. 0: a free one."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # or every answer waits 40 ms
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = AppServer(config)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]))
            await server.listening.wait()
            try:
                yield listener.getsockname()[1]
            finally:
                server.stop.set()
                await serving  # or an error inside the context would cancel the app in the middle of its work
