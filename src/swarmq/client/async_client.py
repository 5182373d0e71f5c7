"""`AsyncSwarmClient`: the client for coroutines. `SwarmClient` (sync_client.py) is its blocking counterpart."""

from __future__ import annotations

from collections.abc import Sequence

from swarmq.client.episodes.client import EpisodeClient, EpisodeOptions
from swarmq.client.runners.attempts import ATTEMPT_TIMEOUT_S, RETRY_PAUSE_S, AgentFunction, RunnerOptions
from swarmq.client.runners.report import EvalReport, RunSummary
from swarmq.client.runners.task_list import Tasks, evaluate_tasks, train_on_tasks


class AsyncSwarmClient(EpisodeClient):
    """Connection to a run: `async with AsyncSwarmClient(invite) as client`.

    `invite` is the invite's text, a file that holds it, a run folder or an Invite; the default is `$SWARMQ_INVITE`.
    Raises KeyRefusedError for an invalid invite, and BrokerError on entering when RabbitMQ cannot be reached or
    refuses the connection.
    """

    async def run_episodes_until_all_complete(
        self,
        tasks: Tasks,
        function: AgentFunction,
        *,
        concurrency: int = 16,
        repeats: int | None = None,
        epochs: int = 1,
        first_epoch: int | None = None,
        policies: Sequence[str] | None = None,
        kind: str | None = None,
        auto_retry: bool = True,
        max_attempts: int = 3,
        retry_pause_s: float = RETRY_PAUSE_S,
        attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
        progress: bool = True,
    ) -> RunSummary:
        """Attempt every task `repeats` times (default: the run's group size) per epoch, `concurrency` episodes at a time.

        `function(ep)` returns a reward or an Outcome; an ordinary function runs in a thread, a coroutine function on the
        event loop. When the function raises or has not returned after `attempt_timeout_s`, the episode fails, the
        traceback is shown once, and the slot is attempted again.
        Each call makes new slots, which are trained in addition to all earlier ones. With `first_epoch` the slots are the
        same at every start, and slots that were trained already are not trained again.
        """
        options = RunnerOptions(
            concurrency=concurrency,
            max_attempts=max_attempts if auto_retry else 1,
            retry_pause_s=retry_pause_s,
            attempt_timeout_s=attempt_timeout_s,
            progress=progress,
        )
        episodes = EpisodeOptions(policies=policies, kind=kind)
        return await train_on_tasks(
            self, tasks, function, episodes, options, repeats=repeats, epochs=epochs, first_epoch=first_epoch
        )

    async def evaluate(
        self,
        tasks: Tasks,
        function: AgentFunction,
        *,
        repeats: int = 1,
        concurrency: int = 16,
        policies: Sequence[str] | None = None,
        kind: str | None = None,
        max_attempts: int = 3,
        retry_pause_s: float = RETRY_PAUSE_S,
        attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
        progress: bool = True,
    ) -> EvalReport:
        """Attempt every task `repeats` times without training. Needs no tickets; the agent's sampling parameters apply."""
        options = RunnerOptions(
            concurrency=concurrency,
            max_attempts=max_attempts,
            retry_pause_s=retry_pause_s,
            attempt_timeout_s=attempt_timeout_s,
            progress=progress,
        )
        episodes = EpisodeOptions(mode="eval", policies=policies, kind=kind)
        return await evaluate_tasks(self, tasks, function, episodes, options, repeats=repeats)
