"""Calls between threads and event loops.

user's threads --run_blocking()--> client's loop (broker connections, heartbeats) ──run_in_thread(), LoopThread──> agents,
agent's loop   --await_on()------>                                                                         which may block
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarmq.errors import ClientError

T = TypeVar("T")
CoroutineFactory = Callable[[], Coroutine[Any, Any, T]]
"""Function that creates the coroutine; called only when the coroutine is certain to be awaited."""

INTERRUPT_S = 10.0
"""Seconds that an interrupted `run_blocking` may take to abort its episodes before the interrupt propagates."""


def run_blocking(loop: asyncio.AbstractEventLoop, make_coroutine: CoroutineFactory[T]) -> T:
    """Run a coroutine on `loop`, which another thread drives, and wait for its result.

    An interrupt cancels the coroutine and waits for its end. Raises ClientError on the loop's own thread, or if the loop is
    closed.
    """
    if _get_running_loop() is loop:
        raise ClientError(
            "a blocking call on the client's own event loop would wait for itself: in coroutines use AsyncSwarmClient, or "
            "await the methods of the AsyncEpisode"
        )
    ended = threading.Event()

    async def run() -> T:
        try:
            return await make_coroutine()
        finally:
            ended.set()

    if loop.is_closed():
        raise ClientError("the client is closed: create a new one")
    future = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        raise ClientError("the client was closed before this call was done") from error
    except BaseException:
        if future.cancel():
            ended.wait(INTERRUPT_S)
        raise


async def await_on(loop: asyncio.AbstractEventLoop, make_coroutine: CoroutineFactory[T]) -> T:
    """Await a coroutine on `loop`, which may be the running loop or another thread's."""
    if _get_running_loop() is loop:
        return await make_coroutine()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make_coroutine(), loop))


async def run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new daemon thread, so that an agent that hangs never keeps the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function, *arguments)
        except BaseException as raised:  # raised again in the waiting coroutine
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended and nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    def settle(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    threading.Thread(target=run, name="swarmq-agent", daemon=True).start()
    result, error = await done
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


class LoopThread:
    """A daemon thread with an event loop, open until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, make_coroutine: CoroutineFactory[T]) -> T:
        """Await a coroutine on this thread's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make_coroutine(), self.loop))

    def close(self) -> None:
        """Cancel the tasks of this loop and end the thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(INTERRUPT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            _cancel_all(self.loop)
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _get_running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
