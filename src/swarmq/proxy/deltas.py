"""Deltas of messages: adding them up, cutting of stop strings, holding back of blanks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def extend(message: Json, delta: Json) -> None:
    """Add a delta to the message that the agent has so far."""
    for key in ("content", "reasoning"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for position, piece in enumerate(delta.get("tool_calls") or ()):
        calls = message.setdefault("tool_calls", [])
        index = piece.get("index", position)
        while len(calls) <= index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


class StopTrim:
    """Filter that cuts a stop string off parsed content. The tokens that the engine reports still contain it.

    A tail that may be the beginning of a stop string is held back until more is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._cuts = bool(stops)
        self._held = ""

    def __call__(self, delta: Json, *, met: str | None, ended: bool) -> Json:
        if not self._cuts:
            return delta
        content = self._held + (delta.get("content") or "")
        if ended:
            cut = content.find(met) if met else -1
            content, self._held = content[:cut] if cut >= 0 else content, ""
        else:
            at = len(content) if delta.get("tool_calls") else max(len(content) - self._keep, 0)
            content, self._held = content[:at], content[at:]
        rest = {key: value for key, value in delta.items() if key != "content"}
        return {**rest, "content": content} if content else rest


class LeadingBlanks:
    """Filter that holds back white space at the beginning of parsed content until text follows. White space that only tool
    calls follow means nothing."""

    def __init__(self) -> None:
        self._held: str | None = ""
        """White space held back; None once text has come."""
        self._calls = False

    def __call__(self, delta: Json, *, ended: bool) -> Json:
        if self._held is None:
            return delta
        self._calls = self._calls or bool(delta.get("tool_calls"))
        self._held += delta.get("content") or ""
        rest = {key: value for key, value in delta.items() if key != "content"}
        if self._held.strip() or (ended and self._held and not self._calls):
            content, self._held = self._held, None
            return {**rest, "content": content}
        return rest
