"""What a person holds of an episode: where to send completions, and how to say that it is over."""

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
    """All that the client knows of one episode; touched on the client's loop only."""

    def __init__(
        self, *, begin: EpisodeBegin, task: SwarmTask, base_url: str, api_key: str, last_attempt: bool = False
    ) -> None:
        self.begin = begin
        self.last_attempt = last_attempt
        self.task = task
        self.base_url = base_url
        self.api_key = api_key
        self.received = ReceivedAnswers(base_url)
        """What its agent was answered in this process."""
        self.end: EpisodeEnd | None = None
        self.sending: asyncio.Task[SwarmqError | None] | None = None
        self.key_was_read = False
        """Set by the agent's thread, once: without its key no model was called."""


class Handle:
    """The facts of an episode, the same in both kinds of handle."""

    def __init__(self, client: EpisodeClient, record: EpisodeRecord) -> None:
        self._client = client
        self._record = record

    def _wait(self, make: CoroutineFactory[T]) -> T:
        self._client.check_usable()
        return run_blocking(self._client.loop, make)

    async def _hop(self, make: CoroutineFactory[T]) -> T:
        self._client.check_usable()
        return await await_on(self._client.loop, make)

    def __repr__(self) -> str:
        begin = self._record.begin
        return f"<{type(self).__name__} {self.episode_id} {begin.slot.id} attempt {begin.attempt}>"

    @property
    def episode_id(self) -> str:
        return self._record.begin.episode_id

    @property
    def base_url(self) -> str:
        """For any OpenAI client: ends in `/v1`."""
        return self._record.base_url

    @property
    def api_key(self) -> str:
        """For any OpenAI client; valid for this episode alone."""
        self._record.key_was_read = True
        received_answers.watch_libraries()  # by now its agent has loaded the one that it uses
        return self._record.api_key

    @property
    def ca(self) -> bytes:
        """Certificate (DER) to trust at `base_url`; empty: those of the machine."""
        return self._client.invite.ca

    @property
    def model(self) -> str:
        """What to pass as `model`: the episode's first policy."""
        return self._record.begin.policies[0]

    @property
    def policies(self) -> tuple[str, ...]:
        return self._record.begin.policies

    @property
    def task(self) -> SwarmTask:
        return self._record.task

    @property
    def payload(self) -> Any:
        """The task's data, as it was fed or listed."""
        return self._record.task.payload

    @property
    def kind(self) -> str:
        return self._record.begin.kind

    @property
    def slot(self) -> Slot:
        return self._record.begin.slot

    @property
    def attempt(self) -> int:
        """0 for the first; above, earlier ones of this slot have failed."""
        return self._record.begin.attempt

    @property
    def mode(self) -> Mode:
        return self._record.begin.mode

    @property
    def outcome(self) -> EpisodeEnd | None:
        """How it ended; None while it is open."""
        return self._record.end

    @property
    def ended(self) -> bool:
        return self._record.end is not None


class AsyncEpisode(Handle):
    """An episode for coroutines, on whatever event loop they run."""

    def blocking(self) -> Episode:
        """The same episode, for ordinary functions in other threads."""
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
        """Finished, with a reward for all policies or one for each, or with an Outcome. Returns once the broker has confirmed it.

        Raises OutcomeError for a reward that is not a finite number (nothing is sent, the episode stays open) and
        EpisodeError when the episode has ended in another way before; the same end again is no error.
        """
        outcome = combine_end_arguments(reward, rewards, success, metrics, metadata, agent_rewards, call_rewards)
        await self._hop(lambda: self._client.end_with(self, outcome))

    async def abort(self, reason: str = "aborted by the client") -> None:
        """Given up on purpose: never trained, the slot is free for another attempt if this was not the last."""
        await self._hop(lambda: self._client.abort_episode(self, reason))

    async def fail(self, reason: str) -> None:
        """Something broke: never trained, never a reward of 0."""
        await self._hop(lambda: self._client.fail_episode(self, reason))


class Episode(Handle):
    """An episode for ordinary functions, in whatever thread they run."""

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
        """As AsyncEpisode.end."""
        outcome = combine_end_arguments(reward, rewards, success, metrics, metadata, agent_rewards, call_rewards)
        self._wait(lambda: self._client.end_with(self, outcome))

    def abort(self, reason: str = "aborted by the client") -> None:
        """As AsyncEpisode.abort."""
        self._wait(lambda: self._client.abort_episode(self, reason))

    def fail(self, reason: str) -> None:
        """As AsyncEpisode.fail."""
        self._wait(lambda: self._client.fail_episode(self, reason))
