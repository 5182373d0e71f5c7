"""The forms in which agents ask, one file each: OpenAI's chat completions, completions and responses, Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping

from swarmq.proxy.dialects.anthropic_messages import ANTHROPIC, CountTokens, Messages
from swarmq.proxy.dialects.base import Dialect, Writer, events, headers, read, request_headers
from swarmq.proxy.dialects.chat_completions import ChatCompletions
from swarmq.proxy.dialects.completions import TextCompletions
from swarmq.proxy.dialects.responses import Responses

MESSAGES = Messages()
DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), TextCompletions(), Responses(), MESSAGES)
"""What the proxy serves. A new dialect is one file and one name here."""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect in which errors on this path are told; where the path is nobody's, the one that the agent's library speaks."""
    theirs = MESSAGES if ANTHROPIC in headers else DIALECTS[0]
    return next((dialect for dialect in DIALECTS if path.startswith(dialect.path)), theirs)


__all__ = ["DIALECTS", "CountTokens", "Dialect", "Writer", "dialect_of", "events", "headers", "read", "request_headers"]
