"""From the rewards of a group to one advantage per turn. Plain Python: the I/O process asks as well.

A turn is credited by the narrowest reward it has: its call's, else its agent tag's, else its episode's. Values are
compared within the group and within the same tag only. Fewer than two values give no baseline, and equal ones nothing to
learn: such turns have no advantage (None) and are left out of every mean. `ema` has a baseline for every turn: what the
run has seen of the kind so far. Losses without a baseline leave no turn out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from swarmq.config import Train
from swarmq.messages import Episode, Turn

EQUAL = 1e-9
"""Rewards closer than this are equal: nothing to learn from but rounding."""
GRPO_EPSILON = 1e-6

Tag = tuple[str, str | None]
Baselines = dict[str, float]
"""Kind, and where a turn is credited apart also how: the `ema` baseline."""
Values = dict[Tag, dict[tuple[str, str], float]]
"""Tag -> (episode, call or nothing) -> reward or advantage."""
Credit = Mapping[str, Sequence[float | None]]
"""episode_id -> one advantage per turn; None for a turn that is not to be trained."""


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Against the mean of the others; unbiased for any n >= 2 (2402.14740)."""
    n = len(rewards)
    return [value * n / (n - 1) for value in centered(rewards)]


def centered(rewards: Sequence[float]) -> list[float]:
    """Against the mean (2503.20783)."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """Centred and divided by the group's standard deviation, n - 1 in its denominator (2402.03300)."""
    values = centered(rewards)
    deviation = math.sqrt(math.fsum(v * v for v in values) / (len(values) - 1))
    return [value / (deviation + GRPO_EPSILON) for value in values]


WITHIN_GROUP: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "rloo": leave_one_out,
    "centered": centered,
    "grpo": standardised,
    "batch_norm": centered,
}
"""`batch_norm` is also divided by the batch's standard deviation of all centred values (2501.03262). `ema` is not
here: it compares with the past (2506.24119)."""


def advantages(
    groups: Sequence[Sequence[Episode]], train: Train, baselines: Mapping[str, float] | None = None
) -> dict[str, list[float | None]]:
    """Credit by the method of each group's kind. `baselines` are those that `ema` has before this batch."""
    methods = [train.of_kind(group[0].kind).advantage for group in groups]
    return {
        episode_id: values
        for name in dict.fromkeys(methods)
        for episode_id, values in _by_method(
            [group for group, method in zip(groups, methods, strict=True) if method == name],
            msgspec.structs.replace(train, advantage=name),
            baselines,
        ).items()
    }


def _by_method(
    groups: Sequence[Sequence[Episode]], train: Train, baselines: Mapping[str, float] | None
) -> dict[str, list[float | None]]:
    rewards = [_rewards(group, train) for group in groups]
    if train.advantage == "ema":
        before = _begun(baselines or {}, groups, rewards)
        values = [
            {tag: {key: r - before[_name(group, tag)] for key, r in of.items()} for tag, of in by_tag.items()}
            for group, by_tag in zip(groups, rewards, strict=True)
        ]
    else:
        values = [_compared(by_tag, WITHIN_GROUP[train.advantage]) for by_tag in rewards]
    deviation = _deviation(values) if train.advantage == "batch_norm" else 1.0
    nothing = None if train.needs_baseline else 0.0
    return {
        episode.episode_id: [
            of_group[tag][episode.episode_id, key] / deviation if of_group[tag] else nothing
            for tag, key in (_credit(episode, turn, train) for turn in episode.turns)
        ]
        for group, of_group in zip(groups, values, strict=True)
        for episode in group
    }


def updated(baselines: Mapping[str, float], groups: Sequence[Sequence[Episode]], train: Train) -> Baselines:
    """The `ema` baselines after a batch: b <- alpha b + (1 - alpha) R for each of its rewards in turn."""
    rewards = [_rewards(group, train) for group in groups]
    after = _begun(baselines, groups, rewards)
    for group, by_tag in zip(groups, rewards, strict=True):
        for tag, of in by_tag.items():
            name = _name(group, tag)
            for reward in of.values():
                after[name] = train.ema_decay * after[name] + (1 - train.ema_decay) * reward
    return after


def has_signal(group: Sequence[Episode], train: Train) -> bool:
    """Whether any turn of the group would get an advantage other than 0, or needs none."""
    return not train.needs_baseline or any(_differ(of) for of in _rewards(group, train).values())


def groups_of(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """The groups of a batch, whose members stand together."""
    return [list(group) for _, group in groupby(episodes, key=lambda episode: episode.group_id)]


def length_penalty(episode: Episode, train: Train) -> float:
    """What the episode's reward loses for its length; the soft punishment of 2503.14476."""
    if (rule := train.length_penalty) is None:
        return 0.0
    sampled = sum(len(turn.sampled_ids) for turn in episode.turns) // 4
    return rule.weight * min(max((sampled - rule.free) / (rule.full - rule.free), 0.0), 1.0)


def credited_by(episode: Episode, train: Train) -> list[str]:
    """What the reward of each turn is that of: `call`, `agent` or `episode`."""
    return [_credit(episode, turn, train)[0][0] for turn in episode.turns]


def _compared(by_tag: Values, within: Callable[[Sequence[float]], list[float]]) -> Values:
    """Of tags whose rewards differ; the others have nothing to be compared with."""
    return {
        tag: dict(zip(of, within(list(of.values())), strict=True)) if _differ(of) else {} for tag, of in by_tag.items()
    }


def _differ(of: Mapping[tuple[str, str], float]) -> bool:
    return len(of) > 1 and max(of.values()) - min(of.values()) > EQUAL


def _deviation(values: Sequence[Values]) -> float:
    centred = [value for by_tag in values for of in by_tag.values() for value in of.values()]
    return math.sqrt(math.fsum(v * v for v in centred) / max(len(centred), 1)) + GRPO_EPSILON


def _begun(baselines: Mapping[str, float], groups: Sequence[Sequence[Episode]], rewards: Sequence[Values]) -> Baselines:
    """The baselines; one that is new begins with the batch's own mean, because A = R would teach only to be rewarded."""
    seen: dict[str, list[float]] = {}
    for group, by_tag in zip(groups, rewards, strict=True):
        for tag, of in by_tag.items():
            seen.setdefault(_name(group, tag), []).extend(of.values())
    return {name: math.fsum(values) / len(values) for name, values in seen.items()} | dict(baselines)


def _name(group: Sequence[Episode], tag: Tag) -> str:
    kind, (level, agent) = group[0].kind, tag
    return kind if level == "episode" else f"{kind}/{level}/{agent or ''}"


def _rewards(group: Sequence[Episode], train: Train) -> Values:
    """All that credits a turn of the group."""
    rewards: Values = {}
    used: set[Tag] = set()
    for episode in group:
        for tag, key, reward in _all_rewards(episode, train):
            rewards.setdefault(tag, {})[episode.episode_id, key] = reward
        used |= {_credit(episode, turn, train)[0] for turn in episode.turns}
    return {tag: rewards[tag] for tag in rewards if tag in used}


def _all_rewards(episode: Episode, train: Train) -> Iterator[tuple[Tag, str, float]]:
    yield ("episode", None), "", episode.reward - length_penalty(episode, train)
    for agent, reward in episode.agent_rewards.items():
        yield ("agent", agent), "", reward
    for turn, value in _of_calls(episode, train):
        yield ("call", turn.agent), turn.call_id, value


def _of_calls(episode: Episode, train: Train) -> Iterator[tuple[Turn, float]]:
    """Each call that is credited for itself, and with what."""
    if train.call_discount is None or not episode.call_rewards:
        yield from ((t, episode.call_rewards[t.call_id]) for t in episode.turns if t.call_id in episode.call_rewards)
        return
    after: dict[str | None, float] = {}
    for turn in reversed(episode.turns):
        if turn.agent in after:
            value = episode.call_rewards.get(turn.call_id, 0.0) + train.call_discount * after[turn.agent]
        else:  # an agent's last call answers for how things ended, unless it has a reward of its own
            ended = episode.agent_rewards.get(turn.agent or "", episode.reward - length_penalty(episode, train))
            value = episode.call_rewards.get(turn.call_id, ended)
        after[turn.agent] = value
        yield turn, value


def _credit(episode: Episode, turn: Turn, train: Train) -> tuple[Tag, str]:
    discounted = train.call_discount is not None and bool(episode.call_rewards)
    if discounted or turn.call_id in episode.call_rewards:
        return ("call", turn.agent), turn.call_id
    if turn.agent is not None and turn.agent in episode.agent_rewards:
        return ("agent", turn.agent), ""
    return ("episode", None), ""
