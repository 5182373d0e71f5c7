"""Credit: which reward a turn is credited with, and what that reward is compared with. Without torch, because the batch feeder uses it,
too.

A turn is credited with the most specific reward that there is: that of its call, else of its agent tag, else of its episode.
Values are compared within the group and the same tag, and only with values of other episodes, because an episode's later calls
depend on its earlier ones. Fewer than two episodes give no baseline, and equal values give nothing to learn: such turns have no
advantage (None) and are left out of every mean. `ema` has a baseline for every turn, from the kind's rewards so far. A loss that
needs no baseline leaves no turn out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from swarmq.config import Train
from swarmq.learner.methods.advantages import AdvantageFunction, EpisodeValues, RewardSet, center, compare, ema
from swarmq.learner.methods.groupings import form_groups
from swarmq.learner.methods.groupings.slot import slot
from swarmq.learner.methods.registry import find_method
from swarmq.learner.methods.rewards import transform_reward
from swarmq.messages import Rollout, Turn

Tag = tuple[Literal["episode", "agent", "call"], str | None]
TagValues = dict[Tag, EpisodeValues]
TurnAdvantages = Mapping[str, Sequence[float | None]]
"""Episode id -> one advantage per turn; None for a turn that is not trained."""


def compute_advantages(
    groups: Sequence[Sequence[Rollout]], train: Train, baselines: Mapping[str, float] | None = None
) -> dict[str, list[float | None]]:
    """Return episode id -> one advantage per turn, by the estimator of each group's kind; None for a turn that is not trained.

    `groups`: the batch's episodes by slot, which `train.grouping` may compare otherwise. `baselines`: `ema` baselines before this
    batch. Raises LearnerError if the grouping is no partition of the episodes.
    """
    groups = form_groups([episode for group in groups for episode in group], train)
    methods = [train.of_kind(group[0].kind).advantage for group in groups]
    return {
        episode_id: values
        for name in dict.fromkeys(methods)
        for episode_id, values in _compute_by_method(
            [group for group, method in zip(groups, methods, strict=True) if method == name],
            msgspec.structs.replace(train, advantage=name),
            baselines,
        ).items()
    }


def _compute_by_method(
    groups: Sequence[Sequence[Rollout]], train: Train, baselines: Mapping[str, float] | None
) -> dict[str, list[float | None]]:
    by_tag = [_collect_rewards(group, train) for group in groups]
    compute: AdvantageFunction = find_method("advantage", train.advantage)
    results = iter(compute(_list_sets(groups, by_tag), train, baselines or {}))
    values = [{tag: next(results) for tag in tags} for tags in by_tag]
    nothing = None if train.needs_baseline else 0.0
    return {
        episode.episode_id: [
            of_group[tag][episode.episode_id][call] if of_group[tag] else nothing for tag, call in keys
        ]
        for group, of_group in zip(groups, values, strict=True)
        for episode, keys in _find_credits(group, train)
    }


def update_baselines(
    baselines: Mapping[str, float], groups: Sequence[Sequence[Rollout]], train: Train
) -> dict[str, float]:
    """Return the `ema` baselines after a batch."""
    sets = _list_sets(groups, [_collect_rewards(group, train) for group in groups])
    return ema.update_baselines(baselines, sets, train.ema_decay)


def has_signal(group: Sequence[Rollout], train: Train) -> bool:
    """Return whether any turn of the slot's group can be trained: with an advantage other than 0, by a loss that needs no
    baseline, or in a group with other slots."""
    return not train.compares_slots or any(compare(of, center) for of in _collect_rewards(group, train).values())


def group_by_slot(episodes: Sequence[Rollout]) -> list[list[Rollout]]:
    """Split a batch into its groups; members of a group are adjacent in `episodes`."""
    return slot(episodes, Train())


def find_credit_levels(group: Sequence[Rollout], train: Train) -> list[str]:
    """Return, for each turn of the group, the level of the reward that credits it: `call`, `agent` or `episode`."""
    return [level for _, keys in _find_credits(group, train) for (level, _), _ in keys]


def _list_sets(groups: Sequence[Sequence[Rollout]], by_tag: Sequence[TagValues]) -> list[RewardSet]:
    return [
        RewardSet(kind=group[0].kind, level=level, agent=agent, rewards=rewards)
        for group, tags in zip(groups, by_tag, strict=True)
        for (level, agent), rewards in tags.items()
    ]


def _collect_rewards(group: Sequence[Rollout], train: Train) -> TagValues:
    """Return all rewards that credit a turn of the group."""
    rewards: dict[Tag, dict[str, dict[str, float]]] = {}
    discounted = _find_discounted(group, train)
    for episode in group:
        for tag, call, reward in _list_rewards(episode, discounted, train):
            rewards.setdefault(tag, {}).setdefault(episode.episode_id, {})[call] = reward
    used = {tag for _, keys in _find_credits(group, train) for tag, _ in keys}
    return {tag: of for tag, of in rewards.items() if tag in used}


def _list_rewards(episode: Rollout, discounted: Sequence[str | None], train: Train) -> Iterator[tuple[Tag, str, float]]:
    yield ("episode", None), "", transform_reward(episode, train)
    yield from ((("agent", agent), "", reward) for agent, reward in episode.agent_rewards.items())
    for turn in episode.turns:
        if turn.call_id in episode.call_rewards and turn.agent not in discounted:
            yield ("call", turn.agent), turn.call_id, episode.call_rewards[turn.call_id]
    for agent in discounted:
        yield from ((("call", agent), call, value) for call, value in _discount_returns(episode, agent, train))


def _find_discounted(group: Sequence[Rollout], train: Train) -> list[str | None]:
    """Return the agents whose calls are credited with discounted returns, because one of their calls in the group has its own
    reward."""
    if train.call_discount is None:
        return []
    return list(dict.fromkeys(t.agent for episode in group for t in episode.turns if t.call_id in episode.call_rewards))


def _discount_returns(episode: Rollout, agent: str | None, train: Train) -> Iterator[tuple[str, float]]:
    """Yield G_k = r_k + gamma G_(k+1) of each call of the agent, from its last request to its first.

    The choices of one request are one step: each has its own reward, and the G of a request is the mean over its choices.
    """
    # a call of the last request gets the agent's or episode's reward, unless it has a reward of its own
    unrated, later = (
        episode.agent_rewards.get(agent or "", transform_reward(episode, train)),
        0.0,
    )
    for choices in reversed(group_by_request(episode, agent)):
        returns = {turn.call_id: episode.call_rewards.get(turn.call_id, unrated) + later for turn in choices}
        yield from returns.items()
        unrated, later = 0.0, (train.call_discount or 0.0) * statistics.fmean(returns.values())


def group_by_request(episode: Rollout, agent: str | None) -> list[list[Turn]]:
    """Return the agent's requests in the order in which they began, each with its choices. Turns are recorded in the order in
    which they ended."""
    requests: dict[str, list[Turn]] = {}
    for turn in sorted(episode.turns, key=lambda turn: turn.timings.began_at):
        if turn.agent == agent:
            requests.setdefault(turn.request_id, []).append(turn)
    return list(requests.values())


def _find_credits(group: Sequence[Rollout], train: Train) -> list[tuple[Rollout, list[tuple[Tag, str]]]]:
    """Return, for each turn, the key of the reward that credits it: tag and call id."""
    discounted = _find_discounted(group, train)
    return [(episode, [_find_credit(episode, turn, discounted) for turn in episode.turns]) for episode in group]


def _find_credit(episode: Rollout, turn: Turn, discounted: Sequence[str | None]) -> tuple[Tag, str]:
    if turn.agent in discounted or turn.call_id in episode.call_rewards:
        return ("call", turn.agent), turn.call_id
    if turn.agent is not None and turn.agent in episode.agent_rewards:
        return ("agent", turn.agent), ""
    return ("episode", None), ""
