"""Escaping of special tokens in agents' messages. Pure.

A tokenizer takes the text `<|im_end|>` for the token that ends a turn, whoever wrote it, so that fetched content could forge
turns of the conversation. If a run escapes such text, a space is put between its first two characters: the model can still read
it, and it is no special token any more.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

Json = dict[str, Any]

MARKUP = re.compile(r"<[|\uff5c][^<>\s]{1,64}[|\uff5c]>|</?[A-Za-z_][\w.:-]{0,63}>|\[/?[A-Z_]{2,32}\]")
"""Pattern of possible special tokens: `<|im_end|>`, `</s>`, `<start_of_turn>`, `[INST]`. The tokenizer says which of them a
model has."""
ASSISTANT = "assistant"
"""Role whose messages stay unchanged: they are the model's answers, whose tokens are known."""


async def escape(chat: Json, is_token: Callable[[str], Awaitable[bool]]) -> Json:
    """Return the chat with every special token in its messages as plain text. `is_token`: returns whether a text is a single
    token."""
    found = {match for message in chat["messages"] for text in _texts(message) for match in MARKUP.findall(text)}
    special = {text for text in found if await is_token(text)}
    if not special:
        return chat
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))

    def plain(text: str) -> str:
        return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    return {**chat, "messages": [_map_texts(message, plain) for message in chat["messages"]]}


def _texts(message: Json) -> list[str]:
    content = message.get("content")
    if message.get("role") == ASSISTANT:
        return []
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return [content] if isinstance(content, str) else []


def _map_texts(message: Json, change: Callable[[str], str]) -> Json:
    content = message.get("content")
    if message.get("role") == ASSISTANT:
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
