"""The client for ordinary code: the same calls, blocking, from any number of threads at once.

your threads ──blocking()──> one daemon thread with the event loop of an AsyncSwarmClient
coroutine agents run on a loop of their own, so that one that blocks does not cost the broker its heartbeats
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
from swarmq.client.episodes.client import DRAIN_S, OpenBroker, open_amqp
from swarmq.client.episodes.episode import AsyncEpisode, Episode
from swarmq.client.episodes.event_loops import CoroutineFactory, LoopThread, run_blocking
from swarmq.errors import ClientError, drop_traceback
from swarmq.keys import Invite

P = ParamSpec("P")
T = TypeVar("T")


def _make_blocking(
    method: Callable[Concatenate[AsyncSwarmClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SwarmClient, P], T]:
    """The blocking twin of an AsyncSwarmClient's method, with its arguments and its documentation."""

    @functools.wraps(method)
    def twin(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(lambda: method(self._client, *args, **kwargs))

    _set_signature(twin, inspect.signature(method))
    return twin


def _return_blocking_episode(
    call: Callable[Concatenate[SwarmClient, P], AsyncEpisode],
) -> Callable[Concatenate[SwarmClient, P], Episode]:
    @functools.wraps(call)
    def twin(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> Episode:
        return call(self, *args, **kwargs).blocking()

    _set_signature(twin, inspect.signature(call).replace(return_annotation="Episode"))
    return twin


def _set_signature(twin: Any, signature: inspect.Signature) -> None:
    """What `help` shows: `signature`, as that of a method of the SwarmClient."""
    this, *others = signature.parameters.values()
    own = this.replace(name="self", annotation=inspect.Parameter.empty)
    twin.__signature__ = signature.replace(parameters=[own, *others])


class SwarmClient:
    """Join a run: `client = SwarmClient()`; close it, or use it in a `with` block. Connects at once.

    `invite` is the text, a file, a run folder or an Invite; without it `$SWARMQ_INVITE`. Raises KeyRefusedError
    where that is wrong and BrokerError when RabbitMQ cannot be reached or refuses. Works in notebooks.
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
        self._lived = asyncio.run_coroutine_threadsafe(self._live(opened), self._io.loop)
        try:
            opened.result()
        except BaseException as error:
            self._lived.cancel()
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
        """Abort open episodes, wait a little for unconfirmed ends (later: the spool), disconnect. Idempotent."""
        if self._pid != os.getpid() or self._io.loop.is_closed():
            return
        atexit.unregister(self.close)
        self._io.loop.call_soon_threadsafe(self._closing.set)
        try:
            self._lived.result(timeout=2 * DRAIN_S)
        finally:
            self._stop_threads()

    @property
    def invite(self) -> Invite:
        return self._client.invite

    @property
    def client_id(self) -> str:
        return self._client.client_id

    begin_episode = _return_blocking_episode(_make_blocking(AsyncSwarmClient.begin_episode))
    end_episode = _make_blocking(AsyncSwarmClient.end_episode)
    abort_episode = _make_blocking(AsyncSwarmClient.abort_episode)
    fail_episode = _make_blocking(AsyncSwarmClient.fail_episode)
    run_episodes_until_all_complete = _make_blocking(AsyncSwarmClient.run_episodes_until_all_complete)
    evaluate = _make_blocking(AsyncSwarmClient.evaluate)

    @contextlib.contextmanager
    def episode(self, task: Any, **options: Any) -> Iterator[Episode]:
        """`with client.episode(task) as ep:`, with `ep.end(reward)` inside; options as begin_episode.

        An exception fails the episode with its traceback as reason, an interrupt aborts it; both go on upwards.
        """
        ep = self.begin_episode(task, **options)
        try:
            yield ep
        except BaseException as error:
            raised = error
            self._call(lambda: self._client.end_after_error(ep, raised))
            raise
        self._call(lambda: self._client.require_end(ep))

    def _call(self, make: CoroutineFactory[T]) -> T:
        if not self._lived.done():
            self._client.check_usable()
        elif error := self._lived.exception():
            raise ClientError(f"the client has broken down: {error!r}; make a new one") from error
        return run_blocking(self._io.loop, make)

    async def _live(self, opened: concurrent.futures.Future[None]) -> None:
        """The client is entered and left in one task, which is this."""
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
