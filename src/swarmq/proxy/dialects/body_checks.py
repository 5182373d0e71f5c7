"""Checks of a request's body before anything expensive is done with it. Pure.

Decoding a body blocks all other calls of the process, and templates and grammars of the engine recurse over it; so brackets are
counted before decoding, and nesting is checked afterwards.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from swarmq.proxy.http_errors import RefusedError

Json = dict[str, Any]

MAX_DEPTH = 64
"""Maximum depth of nested brackets in a body."""
MAX_CONTAINERS = 50_000
"""Maximum number of objects and lists in a body. A conversation of a thousand messages with tool calls has ten thousand."""
TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def decode_object(raw: bytes) -> Json:
    """Decode a body that is an object. Raises RefusedError."""
    if _containers(raw) > MAX_CONTAINERS and _containers(TEXT.sub(b"", raw)) > MAX_CONTAINERS:
        raise RefusedError(f"the body has more than {MAX_CONTAINERS} objects and lists", code="invalid_json")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object", code="invalid_json")
    if _deeper(body, MAX_DEPTH):
        raise RefusedError(f"the body has more than {MAX_DEPTH} levels of nested brackets", code="invalid_json")
    return body


def check_arguments(messages: list[Json]) -> None:
    """Raise RefusedError if the arguments of a tool call have too deeply nested brackets; engines decode this text as JSON."""
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str) and text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(text):
                raise RefusedError(
                    f"arguments of a tool call have more than {MAX_DEPTH} levels of nested brackets",
                    param=f"messages[{number}].tool_calls",
                )


def check_results(messages: list[Json]) -> None:
    """Raise RefusedError for the result of a tool that was never called, which templates would put anywhere or nowhere."""
    called: set[Any] = set()
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        called.update(
            str(call.get("id")) for call in (calls if isinstance(calls, list) else ()) if isinstance(call, dict)
        )
        if message.get("role") == "tool" and str(message.get("tool_call_id")) not in called:
            raise RefusedError(
                f"messages[{number}]: a message of role 'tool' must answer a call of an earlier assistant's message; there is none "
                f"with the id {message.get('tool_call_id')!r:.100}",
                param="messages",
            )


def _is_deep(text: str) -> bool:
    try:
        return _deeper(msgspec.json.decode(text), MAX_DEPTH)
    except RecursionError:
        return True
    except (msgspec.MsgspecError, UnicodeError):
        return False  # not JSON: the engine refuses it


def _containers(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


def _deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_deeper(item, depth - 1) for item in inner if isinstance(item, (dict, list)))
