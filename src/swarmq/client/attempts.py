"""One attempt: call the agent's function with an episode, and turn whatever it does into the episode's end."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from swarmq.client.episode import AsyncEpisode, Episode
from swarmq.client.loops import LoopThread, in_thread
from swarmq.errors import TaskError
from swarmq.outcome import Outcome, as_outcome

if TYPE_CHECKING:
    from swarmq.client.session import AsyncSwarmClient

Returned = float | Outcome | None
AgentFunction = Callable[[Episode], Returned] | Callable[[AsyncEpisode], Awaitable[Returned]]
"""Returns a reward or an Outcome; None only if it has ended the episode itself."""

TIDY_S = 5.0
"""How long an interrupted attempt tries to tell the collector that its episode is aborted."""


class Attempted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one attempt."""

    episode_id: str
    task_id: str
    kind: str
    attempt: int
    reward: float | None = None
    """Mean over the policies; None unless finished."""
    success: bool | None = None
    error: BaseException | None = None
    seconds: float

    @property
    def finished(self) -> bool:
        return self.reward is not None


class Agent:
    """An agent's function, ready to be called: ordinary ones in threads, coroutines on `loop` or where we are."""

    def __init__(self, function: AgentFunction, *, loop: LoopThread | None = None) -> None:
        check_signature(function)
        self._function: Callable[[Any], Any] = function
        self._is_async = inspect.iscoroutinefunction(_innermost(function))
        self._loop = loop

    async def __call__(self, ep: AsyncEpisode) -> Any:
        if not self._is_async:
            return await in_thread(self._function, ep.blocking())
        if self._loop is None:
            return await self._function(ep)
        return await self._loop.call(partial(self._function, ep))


async def attempt(client: AsyncSwarmClient, ep: AsyncEpisode, agent: Agent) -> Attempted:
    """Run the agent on an episode that has begun, and end the episode.

    An exception of the agent fails the episode and is returned, not raised; our own cancellation aborts it.
    """
    began = time.monotonic()
    error: BaseException | None = None
    try:
        returned = await agent(ep)
        if not ep.ended:
            await client.end_with(ep, as_outcome(returned))
    except asyncio.CancelledError as cancelled:
        if _we_are_cancelled():
            await _tidy(client, ep, cancelled)
            raise
        error = RuntimeError("the agent's own task was cancelled")
    except (Exception, SystemExit) as raised:
        error = raised
    if error is not None:
        await client.give_up(ep, error)
    return _attempted(ep, error, time.monotonic() - began)


def check_signature(function: Any) -> None:
    """Raises TaskError unless `function` can be called with one argument, the episode."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise TaskError(f"{name} is not a function: give one that takes an episode and returns a reward")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise TaskError(f"{name} must be callable with one argument, the episode ({error})") from error
    except ValueError:  # a builtin without a signature
        return


def _innermost(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _we_are_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _tidy(client: AsyncSwarmClient, ep: AsyncEpisode, error: BaseException) -> None:
    try:
        async with asyncio.timeout(TIDY_S):
            await client.give_up(ep, error)
    except TimeoutError:
        return  # it is in the spool


def _attempted(ep: AsyncEpisode, error: BaseException | None, seconds: float) -> Attempted:
    end = ep.outcome
    rewards = list(end.rewards.values()) if end else []
    return Attempted(
        episode_id=ep.episode_id,
        task_id=ep.task.id,
        kind=ep.kind,
        attempt=ep.attempt,
        reward=sum(rewards) / len(rewards) if rewards else None,
        success=end.success if end else None,
        error=error,
        seconds=seconds,
    )
