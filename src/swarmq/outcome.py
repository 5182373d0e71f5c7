"""Outcomes of episodes, checked before they are sent: a reward that is not a finite number must never reach a learner."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, SupportsFloat, SupportsIndex

import msgspec

from swarmq.errors import OutcomeError
from swarmq.messages import RESPONSE_ID_PREFIX, EpisodeBegin, EpisodeEnd, find_reward_error

MAX_REPR = 100
"""Maximum number of characters quoted of a value that is no number, which may be the whole answer of a model."""
MAX_REASON = 4000
"""Maximum number of characters kept of a failure's reason. Its beginning is cut off, because a traceback names the error at
its end."""


class Outcome(msgspec.Struct, frozen=True):
    """Rewards and further results of an attempt, returned by an agent's function in place of a single number.

    reward         reward of every trained policy of the episode
    rewards        policy -> reward, in place of `reward`
    success        whether the task was solved; None: unknown
    metrics        name -> number, at most 64 names per task kind; their means are in step and evaluation events and in trackers
    metadata       name -> any value, stored as text in the batch log
    agent_rewards  policy -> agent tag (header `x-swarmq-agent`) -> reward of the model calls with that tag
    call_rewards   call id -> reward of that model call; the call id is the `id` of its answer (`resp_...` in the Responses API)
    """

    reward: float | None = None
    rewards: Mapping[str, float] | None = None
    success: bool | None = None
    metrics: Mapping[str, float] = {}
    metadata: Mapping[str, Any] = {}
    agent_rewards: Mapping[str, Mapping[str, float]] = {}
    call_rewards: Mapping[str, float] = {}


class EpisodeRef(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an episode that its end needs, for senders that do not have the episode's begin."""

    run: str
    episode_id: str
    client_id: str
    policies: tuple[str, ...]


def to_outcome(returned: Any, name: str = "reward") -> Outcome:
    """Return the result of an agent's function, a number or an Outcome, as an Outcome.

    Raises OutcomeError for anything else, naming it `name`.
    """
    return returned if isinstance(returned, Outcome) else Outcome(reward=to_reward(name, returned))


def combine_end_arguments(
    reward: float | Outcome | None,
    rewards: Mapping[str, float] | None,
    success: bool | None,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None,
    agent_rewards: Mapping[str, Mapping[str, float]] | None,
    call_rewards: Mapping[str, float] | None,
) -> Outcome:
    """Return the arguments of `end` as one Outcome. Raises OutcomeError if an Outcome is combined with other arguments."""
    others = (rewards, success, metrics, metadata, agent_rewards, call_rewards)
    if not isinstance(reward, Outcome):
        return Outcome(reward, rewards, success, metrics or {}, metadata or {}, agent_rewards or {}, call_rewards or {})
    if any(other is not None for other in others):
        raise OutcomeError("an Outcome and other fields are given: put them into the Outcome")
    return reward


def make_finished_end(
    begin: EpisodeBegin | EpisodeRef, outcome: Outcome, *, frozen: Collection[str] = ()
) -> EpisodeEnd:
    """Return the end record of an episode with a reward; policies in `frozen` need no reward.

    Raises OutcomeError, which names the invalid field.
    """
    if outcome.success is not None and type(outcome.success).__name__ not in {"bool", "bool_"}:
        raise OutcomeError(f"success is {outcome.success!r}: give True, False or None")
    return EpisodeEnd(
        run=begin.run,
        episode_id=begin.episode_id,
        client_id=begin.client_id,
        status="finished",
        rewards=_rewards(begin, outcome, frozen),
        agent_rewards={
            _check_policy(begin, "agent_rewards", policy): _numbers(f"agent_rewards.{policy}", by_agent, to_reward)
            for policy, by_agent in outcome.agent_rewards.items()
        },
        call_rewards=_numbers(
            "call_rewards",
            {name.removeprefix(RESPONSE_ID_PREFIX): reward for name, reward in outcome.call_rewards.items()},
            to_reward,
        ),
        success=None if outcome.success is None else bool(outcome.success),
        metrics=_numbers("metrics", outcome.metrics, to_metric),
        metadata={str(key): str(value) for key, value in outcome.metadata.items()},
    )


def make_unfinished_end(
    begin: EpisodeBegin | EpisodeRef, status: Literal["aborted", "failed"], reason: str, *, final: bool = False
) -> EpisodeEnd:
    """Return the end record of an episode without a reward, which is never trained and never counted as a reward of 0.

    `final`: no further attempt at the slot will come.
    """
    return EpisodeEnd(
        run=begin.run,
        episode_id=begin.episode_id,
        client_id=begin.client_id,
        status=status,
        reason=reason[-MAX_REASON:],
        final=final,
    )


def explain_untrainable(policies: Sequence[str], known: Sequence[str], frozen: Collection[str]) -> str:
    """Return why an episode of these policies cannot be trained, or "" if it can."""
    if not set(policies) <= set(frozen):
        return ""
    trained = ", ".join(policy for policy in known if policy not in frozen)
    return (
        f"policies: {', '.join(policies)} given, which no learner trains (trained = false): name one of {trained} too, or "
        "begin an evaluation episode (mode='eval')"
    )


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_REPR else f"{text[:MAX_REPR]}..."


def to_finite_float(name: str, value: Any) -> float:
    """Convert any number, also a numpy or torch scalar, to a finite float. Raises OutcomeError if that fails."""
    if value is None:
        raise OutcomeError(
            f"{name} is None: every path through the agent must return a number "
            "(to give up without a reward raise an exception, or call abort())"
        )
    if isinstance(value, (str, bytes)) or not isinstance(value, (SupportsFloat, SupportsIndex)):
        raise OutcomeError(f"{name} is {_quote(value)} of type {type(value).__name__}, not a number")
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise OutcomeError(f"{name} is {_quote(value)}, not a single number: {error}") from error
    if not math.isfinite(result):
        raise OutcomeError(f"{name} is {result}: a reward or metric must be finite")
    return result


def to_reward(name: str, value: Any) -> float:
    """Convert a number to a reward that the learner can train on. Raises OutcomeError if that fails."""
    result = to_finite_float(name, value)
    if problem := find_reward_error(result):
        raise OutcomeError(f"{name} is {result:g}, {problem}")
    return result


def to_metric(name: str, value: Any) -> float:
    """Convert a number to the value of a metric. Raises OutcomeError if that fails."""
    if value is None:
        raise OutcomeError(f"{name} is None: leave out a metric that has no value")
    return to_finite_float(name, value)


def _rewards(begin: EpisodeBegin | EpisodeRef, outcome: Outcome, frozen: Collection[str]) -> dict[str, float]:
    trained = [policy for policy in begin.policies if policy not in frozen]
    if outcome.rewards is None:
        reward = to_reward("reward", outcome.reward)
        return dict.fromkeys(trained or begin.policies, reward)
    if outcome.reward is not None:
        raise OutcomeError("both reward and rewards are given: use reward for all policies, or rewards for each")
    if missing := [policy for policy in trained if policy not in outcome.rewards]:
        raise OutcomeError(
            f"rewards has nothing for {', '.join(missing)}: every trained policy of the episode needs one"
        )
    for policy in outcome.rewards:
        _check_policy(begin, "rewards", policy)
    return _numbers("rewards", outcome.rewards, to_reward)


def _check_policy(begin: EpisodeBegin | EpisodeRef, field: str, policy: str) -> str:
    if policy not in begin.policies:
        raise OutcomeError(f"{field} names {policy!r}; this episode's policies are {', '.join(begin.policies)}")
    return policy


def _numbers(name: str, values: Mapping[str, Any], read: Callable[[str, Any], float]) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise OutcomeError(f"{name} is {values!r}: give a dict of name -> number")
    return {str(key): read(f"{name}.{key}", value) for key, value in values.items()}
