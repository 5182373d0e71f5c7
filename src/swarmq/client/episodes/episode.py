"""Handles of an episode: where to send model calls, and how to end the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarmq.client.data.tasks import SwarmTask
from swarmq.client.episodes import received_answers
from swarmq.client.episodes.event_loops import CoroutineFactory, T, await_on, run_blocking
from swarmq.client.episodes.received_answers import ReceivedAnswers
from swarmq.errors import SwarmqError
from swarmq.messages import EpisodeBegin, EpisodeEnd, Mode, Slot
from swarmq.outcome import Outcome, combine_end_arguments

if TYPE_CHECKING:
    from swarmq.client.episodes.client import EpisodeClient


class EpisodeRecord:
    """Everything the client knows of one episode; used on the client's event loop only."""

    def __init__(
        self, *, begin: EpisodeBegin, task: SwarmTask, base_url: str, api_key: str, last_attempt: bool = False
    ) -> None:
        self.begin = begin
        self.last_attempt = last_attempt
        self.task = task
        self.base_url = base_url
        self.api_key = api_key
        self.received = ReceivedAnswers(base_url)
        """The model calls whose answers this process received."""
        self.end: EpisodeEnd | None = None
        self.sending: asyncio.Task[SwarmqError | None] | None = None
        self.was_read = {"base_url": False, "api_key": False}
        """Attribute that model calls need -> whether the agent has read it. Set by the agent's thread."""


class Handle:
    """Facts of an episode, common to `Episode` and `AsyncEpisode`."""

    def __init__(self, client: EpisodeClient, record: EpisodeRecord) -> None:
        self._client = client
        self._record = record

    def _run(self, make_coroutine: CoroutineFactory[T]) -> T:
        self._client.check_usable()
        return run_blocking(self._client.loop, make_coroutine)

    async def _await(self, make_coroutine: CoroutineFactory[T]) -> T:
        self._client.check_usable()
        return await await_on(self._client.loop, make_coroutine)

    def __repr__(self) -> str:
        begin = self._record.begin
        return f"<{type(self).__name__} {self.episode_id} {begin.slot.id} attempt {begin.attempt}>"

    @property
    def episode_id(self) -> str:
        """Id of the episode."""
        return self._record.begin.episode_id

    @property
    def base_url(self) -> str:
        """URL of the run's proxy for any OpenAI client; ends in `/v1`."""
        self._record.was_read["base_url"] = True
        return self._record.base_url

    @property
    def api_key(self) -> str:
        """API key for any OpenAI client; valid for this episode only."""
        self._record.was_read["api_key"] = True
        received_answers.watch_libraries()  # by now the agent has loaded its HTTP library
        return self._record.api_key

    @property
    def ca(self) -> bytes:
        """Certificate (DER) to trust at `base_url`; empty: trust the machine's certificates."""
        return self._client.invite.ca

    @property
    def received(self) -> ReceivedAnswers:
        """Record of the answers that arrived, for code that forwards the requests of other programs."""
        return self._record.received

    @property
    def model(self) -> str:
        """Value of `model` in requests: the episode's first policy."""
        return self._record.begin.policies[0]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that the key may call."""
        return self._record.begin.policies

    @property
    def task(self) -> SwarmTask:
        """The task that is attempted."""
        return self._record.task

    @property
    def payload(self) -> Any:
        """Data of the task."""
        return self._record.task.payload

    @property
    def kind(self) -> str:
        """Kind of the task."""
        return self._record.begin.kind

    @property
    def slot(self) -> Slot:
        """The slot that is attempted: task, repeat and epoch."""
        return self._record.begin.slot

    @property
    def attempt(self) -> int:
        """Number of earlier attempts at this slot."""
        return self._record.begin.attempt

    @property
    def mode(self) -> Mode:
        """`train` or `eval`."""
        return self._record.begin.mode

    @property
    def outcome(self) -> EpisodeEnd | None:
        """How the episode ended; None while it is open."""
        return self._record.end

    @property
    def ended(self) -> bool:
        """Whether the episode has ended."""
        return self._record.end is not None


class AsyncEpisode(Handle):
    """Handle of an episode for coroutines on any event loop."""

    def blocking(self) -> Episode:
        """Return a blocking handle of the same episode, for functions in other threads."""
        return Episode(self._client, self._record)

    async def end(
        self,
        reward: float | Outcome | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        agent_rewards: Mapping[str, Mapping[str, float]] | None = None,
        call_rewards: Mapping[str, float] | None = None,
    ) -> None:
        """End the episode with one reward for all policies, `rewards` by policy, or an Outcome; return once the broker has
        confirmed the end.

        Raises OutcomeError for a reward that is not a finite number (nothing is sent and the episode stays open), and
        EpisodeError if the episode has already ended differently. A repeated equal end is accepted.
        """
        outcome = combine_end_arguments(reward, rewards, success, metrics, metadata, agent_rewards, call_rewards)
        await self._await(lambda: self._client.end_with(self, outcome))

    async def abort(self, reason: str = "aborted by the client") -> None:
        """Abort the episode on purpose: it is never trained, and its slot can be attempted again unless this was the last
        attempt."""
        await self._await(lambda: self._client.abort_episode(self, reason))

    async def fail(self, reason: str) -> None:
        """Report that something broke: the episode is never trained, and has no reward (which is not a reward of 0)."""
        await self._await(lambda: self._client.fail_episode(self, reason))


class Episode(Handle):
    """Handle of an episode for blocking code in any thread."""

    def end(
        self,
        reward: float | Outcome | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        agent_rewards: Mapping[str, Mapping[str, float]] | None = None,
        call_rewards: Mapping[str, float] | None = None,
    ) -> None:
        """End the episode as `AsyncEpisode.end` does."""
        outcome = combine_end_arguments(reward, rewards, success, metrics, metadata, agent_rewards, call_rewards)
        self._run(lambda: self._client.end_with(self, outcome))

    def abort(self, reason: str = "aborted by the client") -> None:
        """Abort the episode as `AsyncEpisode.abort` does."""
        self._run(lambda: self._client.abort_episode(self, reason))

    def fail(self, reason: str) -> None:
        """Fail the episode as `AsyncEpisode.fail` does."""
        self._run(lambda: self._client.fail_episode(self, reason))
