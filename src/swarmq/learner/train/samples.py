"""Sample conversations of trained episodes as rows of a tracker's table, shortened, as plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from swarmq.messages import Rollout, Turn
from swarmq.runtime.terminal import visible

COLUMNS = ["version", "episode", "task", "kind", "reward", "success", "metrics", "conversation"]
MAX_MESSAGE = 2000
"""Maximum number of characters of one message."""
MAX_CONVERSATION = 16_000


def make_rows(version: int, episodes: Sequence[Rollout], number: int) -> list[list[Any]]:
    """Return one row for each of `number` episodes, spread evenly from the lowest to the highest reward."""
    ranked = sorted(episodes, key=lambda episode: (episode.reward, episode.episode_id))
    number = min(number, len(ranked))
    places = [round(place * (len(ranked) - 1) / max(number - 1, 1)) for place in range(number)]
    return [_make_row(version, ranked[place]) for place in places]


def _make_row(version: int, episode: Rollout) -> list[Any]:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(episode.metrics.items()))
    return [
        version,
        _plain(episode.episode_id),
        _cut(_plain(episode.slot.task_id), MAX_MESSAGE),
        episode.kind,
        episode.reward,
        "" if episode.success is None else str(episode.success),
        _cut(_plain(metrics), MAX_MESSAGE),
        _render(episode.turns),
    ]


def _render(turns: Sequence[Turn]) -> str:
    """Return the messages in the order of their turns. A turn that starts another conversation is marked."""
    parts: list[str] = []
    length = 0
    for number, turn in enumerate(turns):
        lines = ["----"] if number and turn.begins else []
        lines += _read_messages(turn)
        for line in lines:
            if length > MAX_CONVERSATION:
                return _cut("\n\n".join(parts), MAX_CONVERSATION)
            parts.append(line)
            length += len(line)
    return _cut("\n\n".join(parts), MAX_CONVERSATION)


def _read_messages(turn: Turn) -> Iterator[str]:
    if not turn.messages:
        return
    try:
        messages = msgspec.json.decode(turn.messages)
    except (msgspec.DecodeError, RecursionError):
        messages = None
    if not isinstance(messages, list):
        yield "(messages that cannot be read)"
        return
    for message in messages:
        fields = dict(message) if isinstance(message, dict) else {"content": message}
        role, content = fields.pop("role", "?"), fields.pop("content", None)
        text = content if isinstance(content, str) else "" if content is None else _to_json(content)
        more = _to_json(fields) if fields else ""
        yield _cut(_plain(f"[{role}] {text}{' ' if text and more else ''}{more}"), MAX_MESSAGE)


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest} characters cut)"


def _plain(text: str) -> str:
    """Return text without control and bidirectional characters and lone surrogates, which some trackers cannot store."""
    return visible(text.encode(errors="backslashreplace").decode())
