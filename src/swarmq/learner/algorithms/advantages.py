"""Computes one advantage per turn from the rewards of a group. Without torch, because the batch feeder uses it, too.

A turn is credited with the most specific reward that there is: that of its call, else of its agent tag, else of its episode.
Values are compared within the group and the same tag, and only with values of other episodes, because an episode's later calls
depend on its earlier ones. Fewer than two episodes give no baseline, and equal values give nothing to learn: such turns have no
advantage (None) and are left out of every mean. `ema` has a baseline for every turn, from the kind's rewards so far. A loss that
needs no baseline leaves no turn out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from swarmq.config import Train
from swarmq.messages import Rollout, Turn

EQUAL_WITHIN = 1e-9
"""Difference below which rewards count as equal, because only rounding separates them."""
GRPO_EPSILON = 1e-6

Tag = tuple[str, str | None]
Baselines = dict[str, float]
"""Kind -> `ema` baseline; for rewards of agents or calls, `KIND/agent/TAG` or `KIND/call/TAG` -> baseline."""
EpisodeValues = Mapping[str, Mapping[str, float]]
"""Episode id -> call id -> reward or advantage; the call id is "" for rewards of episodes and agents."""
TagValues = dict[Tag, EpisodeValues]
TurnAdvantages = Mapping[str, Sequence[float | None]]
"""Episode id -> one advantage per turn; None for a turn that is not trained."""


def leave_one_out(rewards: EpisodeValues) -> EpisodeValues:
    """Return each value minus the mean of the other episodes' values; unbiased for two or more episodes (2402.14740)."""
    own = {episode: math.fsum(of.values()) for episode, of in rewards.items()}
    total, count = math.fsum(own.values()), sum(map(len, rewards.values()))
    others = {episode: (total - own[episode]) / (count - len(of)) for episode, of in rewards.items()}
    return {e: {call: reward - others[e] for call, reward in of.items()} for e, of in rewards.items()}


def center(rewards: EpisodeValues) -> EpisodeValues:
    """Return `leave_one_out` times (k - 1)/k for k episodes; with one value per episode, each value minus the mean of all
    (2503.20783)."""
    return _scale(leave_one_out(rewards), (len(rewards) - 1) / len(rewards))


def standardize(rewards: EpisodeValues) -> EpisodeValues:
    """Return centred values divided by their standard deviation, with n - 1 in its denominator (2402.03300)."""
    deviation = statistics.stdev(reward for of in rewards.values() for reward in of.values())
    return _scale(center(rewards), 1 / (deviation + GRPO_EPSILON))


WITHIN_GROUP: dict[str, Callable[[EpisodeValues], EpisodeValues]] = {
    "rloo": leave_one_out,
    "centered": center,
    "grpo": standardize,
    "batch_norm": center,
}
"""Methods that compare within a group. `batch_norm` also divides by the batch's standard deviation of all centred values
(2501.03262). `ema` (2506.24119) is missing, because it compares with past batches."""


def compute_advantages(
    groups: Sequence[Sequence[Rollout]], train: Train, baselines: Mapping[str, float] | None = None
) -> dict[str, list[float | None]]:
    """Return episode id -> one advantage per turn, by the estimator of each group's kind; None for a turn that is not trained.

    `baselines`: `ema` baselines before this batch.
    """
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
    rewards = [_collect_rewards(group, train) for group in groups]
    if train.advantage == "ema":
        values = _subtract_baselines(baselines or {}, groups, rewards)
    else:
        within = WITHIN_GROUP[train.advantage]
        values = [{tag: _compare(of, within) for tag, of in by_tag.items()} for by_tag in rewards]
    deviation = _compute_deviation(values) if train.advantage == "batch_norm" else 1.0
    nothing = None if train.needs_baseline else 0.0
    return {
        episode.episode_id: [
            of_group[tag][episode.episode_id][call] / deviation if of_group[tag] else nothing for tag, call in keys
        ]
        for group, of_group in zip(groups, values, strict=True)
        for episode, keys in _find_credits(group, train)
    }


def update_baselines(baselines: Mapping[str, float], groups: Sequence[Sequence[Rollout]], train: Train) -> Baselines:
    """Return the `ema` baselines after a batch: b <- alpha b + (1 - alpha) R for each of its rewards in turn."""
    rewards = [_collect_rewards(group, train) for group in groups]
    after = _add_new_baselines(baselines, groups, rewards)
    for group, by_tag in zip(groups, rewards, strict=True):
        for tag, of in by_tag.items():
            name = _name_baseline(group, tag)
            for reward in _flatten(of):
                after[name] = train.ema_decay * after[name] + (1 - train.ema_decay) * reward
    return after


def has_signal(group: Sequence[Rollout], train: Train) -> bool:
    """Return whether any turn of the group would be trained: with an advantage other than 0, or by a loss that needs no
    baseline."""
    return not train.needs_baseline or any(_compare(of, center) for of in _collect_rewards(group, train).values())


def group_by_slot(episodes: Sequence[Rollout]) -> list[list[Rollout]]:
    """Split a batch into its groups; members of a group are adjacent in `episodes`."""
    return [list(group) for _, group in groupby(episodes, key=lambda episode: episode.group_id)]


def compute_length_penalty(episode: Rollout, train: Train) -> float:
    """Return the penalty for the episode's length (soft overlong punishment, 2503.14476)."""
    if (rule := train.length_penalty) is None:
        return 0.0
    sampled = sum(turn.num_sampled for turn in episode.turns)
    return rule.weight * min(max((sampled - rule.free) / (rule.full - rule.free), 0.0), 1.0)


def find_credit_levels(group: Sequence[Rollout], train: Train) -> list[str]:
    """Return, for each turn of the group, the level of the reward that credits it: `call`, `agent` or `episode`."""
    return [level for _, keys in _find_credits(group, train) for (level, _), _ in keys]


def _compare(of: EpisodeValues, within: Callable[[EpisodeValues], EpisodeValues]) -> EpisodeValues:
    """Return advantages by the estimator `within`; empty if only one episode has rewards in `of`, or if all are equal."""
    rewards = _flatten(of)
    return within(of) if len(of) > 1 and max(rewards) - min(rewards) > EQUAL_WITHIN else {}


def _flatten(of: EpisodeValues) -> list[float]:
    return [value for own in of.values() for value in own.values()]


def _scale(of: EpisodeValues, factor: float) -> EpisodeValues:
    return {episode: {call: value * factor for call, value in own.items()} for episode, own in of.items()}


def _compute_deviation(values: Sequence[TagValues]) -> float:
    centred = [value for by_tag in values for of in by_tag.values() for value in _flatten(of)]
    return math.sqrt(math.fsum(v * v for v in centred) / max(len(centred), 1)) + GRPO_EPSILON


def _subtract_baselines(
    baselines: Mapping[str, float], groups: Sequence[Sequence[Rollout]], rewards: Sequence[TagValues]
) -> list[TagValues]:
    """Return rewards minus their baselines. Rewards that have no baseline yet are centred within the batch, because with A = R
    every positive reward would reinforce its turn, even the worst one."""
    first = {
        name: _compare(of, center) for name, of in _group_by_baseline(groups, rewards).items() if name not in baselines
    }

    def against(name: str, of: EpisodeValues) -> EpisodeValues:
        if name in first:
            return {episode: first[name][episode] for episode in of if episode in first[name]}
        return {e: {call: reward - baselines[name] for call, reward in own.items()} for e, own in of.items()}

    return [
        {tag: against(_name_baseline(group, tag), of) for tag, of in by_tag.items()}
        for group, by_tag in zip(groups, rewards, strict=True)
    ]


def _add_new_baselines(
    baselines: Mapping[str, float], groups: Sequence[Sequence[Rollout]], rewards: Sequence[TagValues]
) -> Baselines:
    """Return `baselines`, extended by those that first occur in this batch and start at the mean of its rewards."""
    return {name: statistics.fmean(_flatten(of)) for name, of in _group_by_baseline(groups, rewards).items()} | dict(
        baselines
    )


def _group_by_baseline(groups: Sequence[Sequence[Rollout]], rewards: Sequence[TagValues]) -> dict[str, EpisodeValues]:
    """Return the rewards of the batch by the name of their `ema` baseline."""
    together: dict[str, dict[str, dict[str, float]]] = {}
    for group, by_tag in zip(groups, rewards, strict=True):
        for tag, of in by_tag.items():
            for episode, own in of.items():
                together.setdefault(_name_baseline(group, tag), {}).setdefault(episode, {}).update(own)
    return dict(together)


def _name_baseline(group: Sequence[Rollout], tag: Tag) -> str:
    kind, (level, agent) = group[0].kind, tag
    return kind if level == "episode" else f"{kind}/{level}/{agent or ''}"


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
    yield ("episode", None), "", episode.reward - compute_length_penalty(episode, train)
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
        episode.agent_rewards.get(agent or "", episode.reward - compute_length_penalty(episode, train)),
        0.0,
    )
    for choices in reversed(_group_by_request(episode, agent)):
        returns = {turn.call_id: episode.call_rewards.get(turn.call_id, unrated) + later for turn in choices}
        yield from returns.items()
        unrated, later = 0.0, (train.call_discount or 0.0) * statistics.fmean(returns.values())


def _group_by_request(episode: Rollout, agent: str | None) -> list[list[Turn]]:
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
