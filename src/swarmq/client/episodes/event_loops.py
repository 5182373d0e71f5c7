"""Between threads and event loops.

the user's threads --blocking()--> the client's loop (broker connections, heartbeats)
an agent's loop    --hop()------->        |
                                          └──in_thread(), LoopThread──> agents, which may block as they like
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
"""Makes the coroutine only when it is certain to run, so that none is left unawaited."""

INTERRUPT_S = 10.0
"""How long an interrupted call may tidy up (abort its episodes) before the interrupt goes on."""


def run_blocking(loop: asyncio.AbstractEventLoop, make: CoroutineFactory[T]) -> T:
    """Run on `loop`, which another thread drives, and wait. An interrupt cancels it and waits for its end."""
    if _get_running_loop() is loop:
        raise ClientError(
            "a blocking call inside the client's own event loop would wait for itself: in coroutines use "
            "AsyncSwarmClient, or await the methods of the episode you were given"
        )
    ended = threading.Event()

    async def run() -> T:
        try:
            return await make()
        finally:
            ended.set()

    if loop.is_closed():
        raise ClientError("the client is closed: make a new one")
    future = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        raise ClientError("the client was closed before this was done") from error
    except BaseException:
        if future.cancel():
            ended.wait(INTERRUPT_S)
        raise


async def await_on(loop: asyncio.AbstractEventLoop, make: CoroutineFactory[T]) -> T:
    """Await on `loop`, be it the running one or another thread's."""
    if _get_running_loop() is loop:
        return await make()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))


async def run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call in a daemon thread of its own: an agent that hangs never keeps the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function, *arguments)
        except BaseException as raised:  # the waiting coroutine decides about it
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

    async def call(self, make: CoroutineFactory[T]) -> T:
        """Await there, from a coroutine here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), self.loop))

    def close(self) -> None:
        """Cancel what still runs there and end the thread."""
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
