"""The forms in which agents ask, one file each: OpenAI's chat completions, completions and responses, Anthropic's messages."""

from __future__ import annotations

from swarmq.proxy.dialects.base import Dialect, Writer, events, headers, read, request_headers
from swarmq.proxy.dialects.chat import Chat
from swarmq.proxy.dialects.completions import TextCompletions
from swarmq.proxy.dialects.messages import CountTokens, Messages
from swarmq.proxy.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (Chat(), TextCompletions(), Responses(), Messages())
"""What the proxy serves. A new dialect is one file and one name here."""


def dialect_of(path: str) -> Dialect:
    """The dialect in which errors on this path are told; chat completions' where the path is nobody's."""
    return next((dialect for dialect in DIALECTS if path.startswith(dialect.path)), DIALECTS[0])


__all__ = ["DIALECTS", "CountTokens", "Dialect", "Writer", "dialect_of", "events", "headers", "read", "request_headers"]
