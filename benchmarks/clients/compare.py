"""Answers as a foreign client reports them, against the text that the recorded tokens spell."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: Any
    """An object, or the JSON text of one: clients report either."""

    @property
    def key(self) -> tuple[str, str]:
        given = self.arguments
        return self.name, json.dumps(json.loads(given) if isinstance(given, str) else given, sort_keys=True)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, as a driver reports it or as tokens spell it."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    parsed: Any = None
    """Only in reports: the object that a library made of a structured answer, its text or the arguments of its one tool."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    equal: int
    """Answers that exactly one recorded turn spells."""
    unequal: tuple[Answer, ...]
    """Answers that no recorded turn spells."""
    unreported: tuple[str, ...]
    """Recorded turns that no reported answer equals."""


def spell(text: str) -> Answer:
    """The answer in the decoded tokens of a turn, by a parser of our own, which shares nothing with the engine's."""
    calls = [json.loads(found) for found in CALL.findall(text)]
    said = CALL.sub("", text)
    return Answer(text=said, calls=tuple(ToolCall(name=c["name"], arguments=c["arguments"]) for c in calls))


def is_equal(reported: Answer, recorded: Answer) -> bool:
    """Text to the character, arguments as JSON. A parsed object may stand for text or for the arguments of the one call."""
    if reported.parsed is not None:
        if recorded.calls:
            return [call.key[1] for call in recorded.calls] == [json.dumps(reported.parsed, sort_keys=True)]
        try:
            return bool(json.loads(recorded.text) == reported.parsed)
        except ValueError:
            return False
    if reported.text != recorded.text:
        return False
    try:
        return [call.key for call in reported.calls] == [call.key for call in recorded.calls]
    except ValueError:  # arguments that are no JSON
        return False


def compare(reported: Sequence[Answer], recorded: Sequence[str]) -> Comparison:
    """Pair every answer with a recorded turn of its own. `recorded` are the decoded tokens of the turns."""
    left = list(recorded)
    unequal = []
    for answer in reported:
        same = next((text for text in left if is_equal(answer, spell(text))), None)
        if same is None:
            unequal.append(answer)
        else:
            left.remove(same)
    return Comparison(equal=len(reported) - len(unequal), unequal=tuple(unequal), unreported=tuple(left))
