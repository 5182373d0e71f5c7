"""One attempt: call the agent's function with an episode, and turn its result or exception into the episode's end.

An attempt has a deadline: a function that hangs fails its episode and frees its lane. A coroutine is then cancelled; a thread
cannot be cancelled, and continues with an API key that has expired.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from swarmq.client.episodes.client import EpisodeClient
from swarmq.client.episodes.episode import AsyncEpisode, Episode
from swarmq.client.episodes.event_loops import LoopThread, run_in_thread
from swarmq.config import ProxySettings
from swarmq.errors import AttemptTimeoutError, OutcomeError, TaskError
from swarmq.outcome import Outcome, to_outcome
from swarmq.runtime.slow_waits import warn_if_slow

Returned = float | Outcome | None


@runtime_checkable
class ServedAgent(Protocol):
    """An agent that needs something to run beside its attempts, as environments do."""

    text: str
    """Name of the agent in messages."""

    async def __call__(self, ep: AsyncEpisode) -> Returned: ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Run what the agent needs while the context is open; enter it on the loop on which the agent is called."""
        ...


AgentFunction = Callable[[Episode], Returned] | Callable[[AsyncEpisode], Awaitable[Returned]] | ServedAgent
"""An agent's function. It returns a reward or an Outcome, or None if it has ended the episode itself."""

ATTEMPT_TIMEOUT_S = ProxySettings().key_lifetime_s
"""Default maximum seconds of one attempt; also the lifetime of its API key."""
RETRY_PAUSE_S = 1.0
"""Seconds to pause before the second attempt; doubled before each further one, so that a short outage does not use up all
attempts."""


class RunnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the episodes of a runner. Raises TaskError for a value out of range."""

    concurrency: int = 16
    """Number of concurrent episodes; for workers, per kind and process."""
    max_attempts: int = 3
    """Maximum number of attempts at a slot; then it is given up."""
    retry_pause_s: float = RETRY_PAUSE_S
    attempt_timeout_s: float = ATTEMPT_TIMEOUT_S
    progress: bool = True
    """Whether to show a progress bar or progress lines."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise TaskError(f"concurrency is {self.concurrency}: it must be at least 1")
        if self.max_attempts < 1:
            raise TaskError(f"max_attempts is {self.max_attempts}: it must be at least 1")
        if not self.attempt_timeout_s > 0:
            raise TaskError(f"attempt_timeout_s is {self.attempt_timeout_s}: an attempt needs more than 0 seconds")


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one attempt."""

    episode_id: str
    task_id: str
    kind: str
    attempt: int
    reward: float | None = None
    """Mean reward over the policies; None unless the episode is finished."""
    success: bool | None = None
    error: BaseException | None = None
    seconds: float

    @property
    def finished(self) -> bool:
        return self.reward is not None


class Agent:
    """An agent's function, ready to be called: ordinary functions in threads, coroutines on `loop` or on the running loop."""

    def __init__(self, function: AgentFunction, *, loop: LoopThread | None = None) -> None:
        check_signature(function)
        self._function: Callable[[Any], Any] = function
        self.name = function.text if isinstance(function, ServedAgent) else _describe_function(function)
        """Name and place for messages: `module.function (file.py:12)`."""
        self.is_async = inspect.iscoroutinefunction(_unwrap_partial(function))
        self._loop = loop

    async def __call__(self, ep: AsyncEpisode) -> Any:
        if not self.is_async:
            return await run_in_thread(self._function, ep.blocking())
        if self._loop is None:
            return await self._function(ep)
        return await self._loop.call(partial(self._function, ep))


async def attempt(client: EpisodeClient, ep: AsyncEpisode, agent: Agent, *, timeout_s: float) -> AttemptResult:
    """Run the agent on an episode that has begun, end the episode, and return when the end is confirmed.

    An exception of the agent, or `timeout_s` without an end, fails the episode and is returned, not raised. A cancellation of
    this call aborts the episode.
    """
    began = time.monotonic()
    error: BaseException | None = None
    try:
        returned = await _call_within(agent, ep, timeout_s, client.limits.slow_attempt_s)
        if not ep.ended:
            await _end_with_returned(client, ep, agent, returned)
    except asyncio.CancelledError as cancelled:
        if _is_being_cancelled():
            await _abort_within_limit(client, ep, cancelled)
            raise
        error = RuntimeError("the agent's own task was cancelled")
    except (Exception, SystemExit) as raised:
        error = raised
    if error is not None:
        await client.end_after_error(ep, error)
    await client.wait_for_confirmation(ep)
    return _make_result(ep, error, time.monotonic() - began)


async def _end_with_returned(client: EpisodeClient, ep: AsyncEpisode, agent: Agent, returned: Any) -> None:
    """End the episode with the agent's return value. Raises OutcomeError, naming the function, if the value is not an outcome."""
    outcome = to_outcome(returned, f"what {agent.name} returned")
    try:
        await client.end_with(ep, outcome)
    except OutcomeError as flaw:
        raise OutcomeError(f"{agent.name} returned an Outcome: {flaw}") from None


async def _call_within(agent: Agent, ep: AsyncEpisode, timeout_s: float, slow_s: float) -> Any:
    """Return the agent's result, and log a call that takes longer than `slow_s`. Raises AttemptTimeoutError after `timeout_s`, even if the interrupted agent still returns a
    result."""
    after = "it was cancelled" if agent.is_async else "its thread goes on, as threads cannot be stopped"
    error = AttemptTimeoutError(
        f"the agent has not returned within {timeout_s:g} s (attempt_timeout_s); {after}, and its api key has expired"
    )
    long = warn_if_slow(
        "agent_runs_long",
        first_s=min(slow_s, timeout_s / 2),
        episode=ep.episode_id,
        task=ep.task.id,
        kind=ep.kind,
        fails_after_s=timeout_s,
    )
    with long:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                returned = await agent(ep)
        except Exception as raised:
            if limit.expired():
                raise error from raised
            raise
    if limit.expired():
        raise error
    return returned


def check_signature(function: Any) -> None:
    """Raise TaskError unless `function` can be called with one argument, the episode."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise TaskError(f"{name} is not a function: give one that takes an episode and returns a reward")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise TaskError(f"{name} must be callable with one argument, the episode ({error})") from error
    except ValueError:  # a builtin without a signature
        return


def _unwrap_partial(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _describe_function(function: Any) -> str:
    inner = inspect.unwrap(_unwrap_partial(function))
    code = getattr(inner, "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    return f"{inner.__module__}.{inner.__qualname__}{place}"


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _abort_within_limit(client: EpisodeClient, ep: AsyncEpisode, error: BaseException) -> None:
    try:
        async with asyncio.timeout(client.limits.abort_timeout_s):
            await client.end_after_error(ep, error)
    except TimeoutError:
        return  # the end is in the spool


def _make_result(ep: AsyncEpisode, error: BaseException | None, seconds: float) -> AttemptResult:
    end = ep.outcome
    rewards = list(end.rewards.values()) if end else []
    return AttemptResult(
        episode_id=ep.episode_id,
        task_id=ep.task.id,
        kind=ep.kind,
        attempt=ep.attempt,
        reward=sum(rewards) / len(rewards) if rewards else None,
        success=end.success if end else None,
        error=error,
        seconds=seconds,
    )
