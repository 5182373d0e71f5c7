"""A real engine that plays the part of an agent's model: what it samples is held to a grammar, so that it makes sense.

Whatever the client and its dialect, a conversation is two tool calls at once, one more, and a closing word.
"""

from __future__ import annotations

from swarmq.engine.client.protocol import Json, RenderedPrompt
from swarmq.engine.client.vllm import VllmEngine

CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}\n</tool_call>'
SCRIPT = {0: CALL + CALL, 2: CALL}
"""Tool results so far -> what to say; the closing word for any other number."""
CLOSING = r"The sum is [1-9][0-9]\."
TURNS = 3


class SteeredEngine(VllmEngine):
    async def render(self, chat: Json) -> RenderedPrompt:
        results = sum(message["role"] == "tool" for message in chat["messages"])
        return await super().render({**chat, "structured_outputs": {"regex": SCRIPT.get(results, CLOSING)}})
