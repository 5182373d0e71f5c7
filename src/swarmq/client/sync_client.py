"""`SwarmClient`: the blocking client, for any number of threads at once.

your threads ──run_blocking()──> daemon thread with the event loop of an AsyncSwarmClient
coroutine agents ──────────────> daemon thread with a loop of its own, so that a blocking agent delays no broker heartbeats
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.episodes.client import OpenBroker, open_amqp
from swarmq.client.episodes.episode import AsyncEpisode, Episode
from swarmq.client.episodes.event_loops import CoroutineFactory, LoopThread, run_blocking
from swarmq.errors import ClientError, drop_traceback
from swarmq.keys import Invite

P = ParamSpec("P")
T = TypeVar("T")


def _make_blocking(
    method: Callable[Concatenate[AsyncSwarmClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SwarmClient, P], T]:
    """Return the blocking counterpart of an AsyncSwarmClient method, with its arguments and its documentation."""

    @functools.wraps(method)
    def blocking_method(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(lambda: method(self._client, *args, **kwargs))

    _set_signature(blocking_method, inspect.signature(method))
    return blocking_method


def _return_blocking_episode(
    method: Callable[Concatenate[SwarmClient, P], AsyncEpisode],
) -> Callable[Concatenate[SwarmClient, P], Episode]:
    @functools.wraps(method)
    def blocking_method(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> Episode:
        return method(self, *args, **kwargs).blocking()

    _set_signature(blocking_method, inspect.signature(method).replace(return_annotation="Episode"))
    return blocking_method


def _set_signature(method: Any, signature: inspect.Signature) -> None:
    """Set the signature that `help` shows, with `self` first."""
    first, *others = signature.parameters.values()
    itself = first.replace(name="self", annotation=inspect.Parameter.empty)
    method.__signature__ = signature.replace(parameters=[itself, *others])


class SwarmClient:
    """Connection to a run for blocking code: `client = SwarmClient()`; close it, or use it in a `with` block. Works in
    notebooks.

    `invite` is the invite's text, a file that holds it, a run folder or an Invite; the default is `$SWARMQ_INVITE`. Connects at
    once. Raises KeyRefusedError for an invalid invite, and BrokerError if RabbitMQ cannot be reached or refuses the connection.
    """

    def __init__(
        self,
        invite: Invite | str | os.PathLike[str] | None = None,
        *,
        code_version: str | None = None,
        spool: Path | None = None,
        open_broker: OpenBroker = open_amqp,
    ) -> None:
        self._client = AsyncSwarmClient(invite, code_version=code_version, spool=spool, open_broker=open_broker)
        self._client.agent_loop = LoopThread("swarmq-agents")
        self._io = LoopThread("swarmq-client")
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._running = asyncio.run_coroutine_threadsafe(self._run_client(opened), self._io.loop)
        try:
            opened.result()
        except BaseException as error:
            self._running.cancel()
            self._stop_threads()
            raise drop_traceback(error) from None
        self._pid = os.getpid()
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort open episodes, wait briefly for unconfirmed ends, which otherwise stay in the spool, and disconnect.
        Idempotent."""
        if self._pid != os.getpid() or self._io.loop.is_closed():
            return
        atexit.unregister(self.close)
        self._io.loop.call_soon_threadsafe(self._closing.set)
        try:
            self._running.result(timeout=2 * self._client.limits.drain_s)
        finally:
            self._stop_threads()

    @property
    def invite(self) -> Invite:
        """The invite with which the client joined."""
        return self._client.invite

    @property
    def client_id(self) -> str:
        """Name of this client, as the run's lists show it."""
        return self._client.client_id

    begin_episode = _return_blocking_episode(_make_blocking(AsyncSwarmClient.begin_episode))
    end_episode = _make_blocking(AsyncSwarmClient.end_episode)
    abort_episode = _make_blocking(AsyncSwarmClient.abort_episode)
    fail_episode = _make_blocking(AsyncSwarmClient.fail_episode)
    run_episodes_until_all_complete = _make_blocking(AsyncSwarmClient.run_episodes_until_all_complete)
    evaluate = _make_blocking(AsyncSwarmClient.evaluate)

    @contextlib.contextmanager
    def episode(self, task: Any, **options: Any) -> Iterator[Episode]:
        """Begin an episode and end it inside the block: `with client.episode(task) as ep:` with `ep.end(reward)`.

        `options` are those of `begin_episode`. An exception fails the episode with the traceback as its reason, an interrupt
        aborts it; both propagate.
        """
        ep = self.begin_episode(task, **options)
        try:
            yield ep
        except BaseException as error:
            raised = error
            self._call(lambda: self._client.end_after_error(ep, raised))
            raise
        self._call(lambda: self._client.require_end(ep))

    def _call(self, make_coroutine: CoroutineFactory[T]) -> T:
        if not self._running.done():
            self._client.check_usable()
        elif error := self._running.exception():
            raise ClientError(f"the client has failed ({error!r}): create a new one") from error
        return run_blocking(self._io.loop, make_coroutine)

    async def _run_client(self, opened: concurrent.futures.Future[None]) -> None:
        """Enter and leave the client in one task, as its task group requires."""
        self._closing = asyncio.Event()
        try:
            async with self._client:
                opened.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    def _stop_threads(self) -> None:
        self._io.close()
        if self._client.agent_loop:
            self._client.agent_loop.close()
