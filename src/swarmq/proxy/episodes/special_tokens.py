"""Special tokens within what agents send: a tokenizer takes the text `<|im_end|>` for the token that ends a turn, whoever wrote it.

What a tool has fetched from somewhere could so forge turns of the conversation. Where a run escapes such text, a space comes
between its first two characters: the model still reads it, and it is no special token any more. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

Json = dict[str, Any]

MARKUP = re.compile(r"<[|\uff5c][^<>\s]{1,64}[|\uff5c]>|</?[A-Za-z_][\w.:-]{0,63}>|\[/?[A-Z_]{2,32}\]")
"""How special tokens look: `<|im_end|>`, `</s>`, `<start_of_turn>`, `[INST]`. Which of them a model has, its tokenizer says."""
SPOKEN = "assistant"
"""Whose messages stay as they are: they are answers of the model, whose tokens are known."""


async def escape(chat: Json, is_token: Callable[[str], Awaitable[bool]]) -> Json:
    """The chat with every special token in its messages spelled as text. `is_token`: a text is one token of the model's."""
    found = {match for message in chat["messages"] for text in _texts(message) for match in MARKUP.findall(text)}
    special = {text for text in found if await is_token(text)}
    if not special:
        return chat
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))

    def plain(text: str) -> str:
        return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    return {**chat, "messages": [_mapped(message, plain) for message in chat["messages"]]}


def _texts(message: Json) -> list[str]:
    content = message.get("content")
    if message.get("role") == SPOKEN:
        return []
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return [content] if isinstance(content, str) else []


def _mapped(message: Json, change: Callable[[str], str]) -> Json:
    content = message.get("content")
    if message.get("role") == SPOKEN:
        return message
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "text": change(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
        for part in content
    ]
    return {**message, "content": parts}
