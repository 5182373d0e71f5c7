"""OpenAI's completions: a prompt of text or tokens, without a chat template.

An agent that continues an answer sends prompt, answer and more as one text. The text is split where an earlier prompt and
answer of the episode ended, so that the conversation is recognised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from swarmq.engine.client.protocol import Logprob
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.dialects import known_parameters, openapi_schemas
from swarmq.proxy.dialects.base import MAX_TOP_LOGPROBS, count, flag, options, refuse_fields
from swarmq.proxy.dialects.openai_chunks import ChunkWriter, head, usage
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.proxy.http_errors import Refusal, RefusedError
from swarmq.proxy.requests import ChoiceDelta, ChoiceResult, DialectRequest, NamedConversation

Json = dict[str, Any]
Prompt = str | list[int]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens`."""


class TextCompletions:
    path = "/v1/completions"
    summary = "OpenAI's completions"
    body = openapi_schemas.COMPLETION
    fields: frozenset[str] | None = known_parameters.COMPLETION

    def ask(self, body: Json, conversations: Conversations) -> DialectRequest:
        prompt = _prompt(body)
        if options(body, "stream_options") and not flag(body, "stream"):
            raise RefusedError("stream_options is only allowed when stream is true", param="stream_options")
        refuse_fields(body, "suffix", why="the model writes no text before a given suffix")
        if (count(body, "best_of") or 1) > (count(body, "n") or 1):
            raise RefusedError(
                "best_of above n is not supported: request n choices instead",
                code="unsupported_parameter",
                param="best_of",
            )
        earlier = _find_continued(prompt, conversations)
        text = prompt if isinstance(prompt, str) else str(prompt)
        rest = text[sum(len(message["content"]) for message in earlier) :]
        messages = [*earlier, {"role": "user", "content": rest}] if rest or not earlier else earlier
        chat = {key: value for key, value in body.items() if key not in ("logprobs", "best_of", "prompt")}
        limit = body.get("max_tokens")
        chat |= {"prompt": prompt, "messages": messages, "max_tokens": DEFAULT_MAX_TOKENS if limit is None else limit}
        if (top := count(body, "logprobs", low=0, high=MAX_TOP_LOGPROBS)) is not None:
            chat |= {"logprobs": True, "top_logprobs": top}
        kept = NamedConversation(messages=messages, name=lambda _, message: _name(text + message["content"]))
        return DialectRequest(chat=chat, conversation=kept if isinstance(prompt, str) else None)

    def answer(self, begun: ActiveCall, choices: Sequence[ChoiceResult]) -> Json:
        return {
            **head(begun, "text_completion"),
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.message["content"],
                    "logprobs": _logprobs(begun, choice.entries, 0),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage(begun, choices),
        }

    def writer(self, begun: ActiveCall) -> TextWriter:
        return TextWriter(begun)

    def refusal(self, refusal: Refusal) -> Json:
        return refusal.body


class TextWriter(ChunkWriter):
    def __init__(self, begun: ActiveCall) -> None:
        super().__init__(begun, "text_completion")
        self._offsets: dict[int, int] = {}

    def gain(self, gain: ChoiceDelta) -> bytes:
        text = gain.delta.get("content") or ""
        offset = self._offsets.get(gain.index, 0)
        self._offsets[gain.index] = offset + sum(len(entry.token) for entry in gain.logprobs)
        logprobs = _logprobs(self.begun, gain.logprobs, offset)
        if not text and not logprobs:
            return b""
        return self.chunk({"index": gain.index, "text": text, "logprobs": logprobs, "finish_reason": None})

    def end(self, ended: ChoiceResult) -> bytes:
        self.ended.append(ended)
        why = {"finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}
        return self.chunk({"index": ended.index, "text": "", "logprobs": None, **why})


def _prompt(body: Json) -> Prompt:
    """Return the prompt as text or token ids; a list of one prompt counts as that prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(isinstance(p, (str, list)) for p in prompt):
        raise RefusedError("one request completes one prompt: send each prompt in its own request", param="prompt")
    if isinstance(prompt, list) and prompt and all(type(p) is int and 0 <= p < 2**31 for p in prompt):
        return prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    raise RefusedError("prompt must be text or a list of token ids, not empty", param="prompt")


def _find_continued(prompt: Prompt, conversations: Conversations) -> list[Json]:
    """Return the longest conversation of the episode whose text begins the prompt."""
    if not isinstance(prompt, str):
        return []
    lengths = {int(name.partition(":")[0]) for name in conversations if name[0].isdecimal() and ":" in name}
    for length in sorted((n for n in lengths if n <= len(prompt)), reverse=True):
        if found := conversations.recall(_name(prompt[:length])):
            return found
    return []


def _name(text: str) -> str:
    return f"{len(text)}:{hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def _logprobs(begun: ActiveCall, logprobs: Sequence[Logprob], offset: int) -> Json | None:
    chat = begun.request.chat
    if not chat.get("logprobs"):
        return None
    offsets = []
    for entry in logprobs:
        offsets.append(offset)
        offset += len(entry.token)
    top = chat["top_logprobs"]
    alternatives = [{str(t["token"]): t["logprob"] for t in entry.top_logprobs[:top]} for entry in logprobs]
    return {
        "tokens": [entry.token for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": alternatives if top else None,
        "text_offset": offsets,
    }
