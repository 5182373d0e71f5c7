"""Probe whether an engine's tool parsers accept a stream in large portions, tried once on tool calls in the model's own format.

Most parsers find the same calls however a stream is cut. Some find at most one thing in each portion and lose the rest
(vLLM's `llama3_json`); their streams must be parsed token by token.
"""

from __future__ import annotations

import json
from typing import Any

from swarmq.engine.client.protocol import CompleteAnswer, Engine, Json
from swarmq.errors import EngineError
from swarmq.proxy.deltas import extend

_CALLS = [("add", {"a": 17, "b": "25"}), ("look", {"at": ["it", {"deep": True}]})]
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name, _ in _CALLS]
_QUESTION = {"role": "user", "content": "Add 17 and 25."}
_ANSWER = {
    "role": "assistant",
    "content": "Both.",
    "tool_calls": [
        {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(_CALLS)
    ],
}
CUTS = (1000, 16, 5)
"""Sizes of portions with which the parsers are tried, in tokens."""


async def finds_tool_calls(engine: Engine) -> bool:
    """Return whether the parsers find all tool calls; also False if the model's template does not show how two calls are written."""
    chat = {"messages": [_QUESTION], "tools": _TOOLS}
    try:
        prompt = (await engine.render(chat)).token_ids
        conversation = (
            await engine.render({**chat, "messages": [_QUESTION, _ANSWER], "add_generation_prompt": False})
        ).token_ids
        same = next(
            (i for i, pair in enumerate(zip(prompt, conversation, strict=False)) if pair[0] != pair[1]), len(prompt)
        )
        answer = conversation[same:]
        [message] = await engine.derender(chat, prompt, [CompleteAnswer(token_ids=answer, finish_reason="stop")])
        found = [_calls(message)]
        for size in CUTS:
            message, state = {}, None
            for at in range(0, len(answer), size):
                ended = "stop" if at + size >= len(answer) else None
                delta, state = await engine.derender_delta(
                    chat, prompt, answer[at : at + size], finish_reason=ended, state=state
                )
                extend(message, delta)
            found.append(_calls(message))
    except (EngineError, ValueError):
        return False
    return all(calls == _CALLS for calls in found)


def _calls(message: Json) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
