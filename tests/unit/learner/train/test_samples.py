"""Tables of trackers get few conversations, from the worst to the best, cut and without anything but plain text."""

from __future__ import annotations

import msgspec

from support.episodes import make_episode
from swarmq.learner.train.samples import COLUMNS, MAX_CONVERSATION, MAX_MESSAGE, make_rows
from swarmq.messages import Rollout


def speak(episode: Rollout, *turns: object, begins: bool = False) -> Rollout:
    """The episode with these messages, a list for each turn."""
    first = episode.turns[0]
    made = tuple(
        msgspec.structs.replace(
            first,
            call_id=f"c{number}",
            begins=begins,
            messages=turn if isinstance(turn, bytes) else msgspec.json.encode(turn),
        )
        for number, turn in enumerate(turns)
    )
    return msgspec.structs.replace(episode, turns=made)


def text_of(episode: Rollout) -> str:
    ((*_, text),) = make_rows(3, [episode], 1)
    assert isinstance(text, str)
    return text


def test_rows_go_from_the_lowest_to_the_highest_reward() -> None:
    episodes = [make_episode("g", number, reward=number / 10, metrics={"calls": 2.0}) for number in (5, 0, 9, 3, 7)]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in make_rows(3, episodes, 3)]
    assert [row["reward"] for row in rows] == [0.0, 0.5, 0.9]
    assert {key: rows[0][key] for key in COLUMNS[:4]} == {
        "version": 3,
        "episode": "g-0",
        "task": "g",
        "kind": "default",
    }
    assert (rows[0]["success"], rows[0]["metrics"]) == ("", "calls 2")
    assert len(make_rows(3, episodes, 99)) == 5
    assert make_rows(3, [], 4) == []
    assert [row[4] for row in make_rows(3, episodes, 1)] == [0.0]


def test_a_conversation_reads_as_text_with_tool_calls_and_parts() -> None:
    calls = [{"id": "1", "function": {"name": "search", "arguments": "{}"}}]
    first = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    text = text_of(speak(make_episode(), first, [{"role": "user", "content": [{"type": "text", "text": "part"}]}]))
    assert text.startswith('[user] Hello\n\n[assistant] {"tool_calls":[{"id":"1"')
    assert text.endswith('[user] [{"type":"text","text":"part"}]')
    assert "----" in text_of(speak(make_episode(), first, first, begins=True))


def test_hostile_and_huge_text_is_cut_and_made_visible() -> None:
    evil = "\x1b[2J\u202e<script>alert(1)</script>"
    text = text_of(speak(make_episode(), [{"role": evil, "content": evil}]))
    assert "\x1b" not in text
    assert "\u202e" not in text
    huge = text_of(speak(make_episode(), [{"role": "user", "content": "x" * 5_000_000}]))
    assert len(huge) < MAX_MESSAGE + 100
    assert huge.endswith("characters cut)")
    many = text_of(speak(make_episode(), *([{"role": "user", "content": "y" * 1000}] for _ in range(100))))
    assert len(many) < MAX_CONVERSATION + 100


def test_messages_that_are_no_messages_are_said_to_be_unreadable() -> None:
    deep = b"[" * 100_000
    turns = (b"", b"{", b'{"role": 1}', b"\xff\xfe", deep, ["loose", None, {"content": "no role"}])
    text = text_of(speak(make_episode(), *turns))
    assert text.count("(messages that cannot be read)") == 4
    assert "[?] loose" in text
    assert "[?] no role" in text
