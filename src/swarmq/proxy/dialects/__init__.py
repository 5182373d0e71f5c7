"""The dialects of the proxy, one file each: OpenAI's chat completions, completions and responses, and Anthropic's messages.

A dialect translates a request into a chat request, and choices into its own answer (`base`). `*_checks` refuse what an engine
would not survive. This package runs in the proxy and imports neither engines nor `completions`.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmq.proxy.dialects.anthropic_messages import ANTHROPIC, CountTokens, Messages
from swarmq.proxy.dialects.base import Dialect, Writer, read_request, request_headers, response_headers
from swarmq.proxy.dialects.chat_completions import ChatCompletions
from swarmq.proxy.dialects.completions import TextCompletions
from swarmq.proxy.dialects.responses import Responses

MESSAGES = Messages()
DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), TextCompletions(), Responses(), MESSAGES)
"""The dialects that the proxy serves. A new dialect is one file and one entry here."""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Return the dialect of errors on this path; on an unknown path, the dialect of the agent's client library."""
    theirs = MESSAGES if ANTHROPIC in headers else DIALECTS[0]
    return next((dialect for dialect in DIALECTS if path.startswith(dialect.path)), theirs)


__all__ = [
    "DIALECTS",
    "MESSAGES",
    "CountTokens",
    "Dialect",
    "Writer",
    "dialect_of",
    "read_request",
    "request_headers",
    "response_headers",
]
