"""From the rewards of a group to one advantage per turn. Plain Python: the I/O process asks as well.

A turn is credited by the narrowest reward it has: its call's, else its agent tag's, else its episode's. Values are
compared within the group and within the same tag only. Fewer than two values give no baseline and no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from swarmq.messages import Episode, Turn

EQUAL = 1e-9
"""Rewards closer than this are equal: nothing to learn from but rounding."""
GRPO_EPSILON = 1e-6

Tag = tuple[str, str | None]


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
"""`batch_norm` is also divided by the batch's standard deviation of all centred values (2501.03262)."""


def advantages(groups: Sequence[Sequence[Episode]], name: str) -> dict[str, list[float]]:
    """episode_id -> one advantage per turn."""
    by_group = [_of_group(group, WITHIN_GROUP[name]) for group in groups]
    if name == "batch_norm":
        centred = [value for values, _ in by_group for tag_values in values.values() for value in tag_values.values()]
        deviation = math.sqrt(math.fsum(v * v for v in centred) / max(len(centred), 1)) + GRPO_EPSILON
    else:
        deviation = 1.0
    return {
        episode.episode_id: [
            values[tag].get((episode.episode_id, key), 0.0) / deviation for tag, key in credit[episode.episode_id]
        ]
        for group, (values, credit) in zip(groups, by_group, strict=True)
        for episode in group
    }


def has_signal(group: Sequence[Episode]) -> bool:
    """Whether any turn of the group would get an advantage other than 0."""
    return any(
        len(rewards) > 1 and max(rewards.values()) - min(rewards.values()) > EQUAL
        for rewards in _rewards(group).values()
    )


def _of_group(
    group: Sequence[Episode], within: Callable[[Sequence[float]], list[float]]
) -> tuple[dict[Tag, dict[tuple[str, str], float]], dict[str, list[tuple[Tag, str]]]]:
    """Tag -> (episode, call) -> advantage, and for each episode what credits each of its turns."""
    values = {
        tag: dict(zip(rewards, within(list(rewards.values())), strict=True)) if len(rewards) > 1 else {}
        for tag, rewards in _rewards(group).items()
    }
    return values, {e.episode_id: [_credit(e, turn) for turn in e.turns] for e in group}


def _rewards(group: Sequence[Episode]) -> dict[Tag, dict[tuple[str, str], float]]:
    """Tag -> (episode, call or nothing) -> reward, of all that credits a turn of the group."""
    rewards: dict[Tag, dict[tuple[str, str], float]] = {}
    used: set[Tag] = set()
    for episode in group:
        for tag, key, reward in _all_rewards(episode):
            rewards.setdefault(tag, {})[episode.episode_id, key] = reward
        used |= {_credit(episode, turn)[0] for turn in episode.turns}
    return {tag: rewards[tag] for tag in rewards if tag in used}


def _all_rewards(episode: Episode) -> Iterator[tuple[Tag, str, float]]:
    yield ("episode", None), "", episode.reward
    for agent, reward in episode.agent_rewards.items():
        yield ("agent", agent), "", reward
    for turn in episode.turns:
        if turn.call_id in episode.call_rewards:
            yield ("call", turn.agent), turn.call_id, episode.call_rewards[turn.call_id]


def _credit(episode: Episode, turn: Turn) -> tuple[Tag, str]:
    if turn.call_id in episode.call_rewards:
        return ("call", turn.agent), turn.call_id
    if turn.agent is not None and turn.agent in episode.agent_rewards:
        return ("agent", turn.agent), ""
    return ("episode", None), ""
