"""OpenAI's chat completions: the form into which all other dialects are translated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarmq.engine.client.protocol import Logprob
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.dialects import known_parameters, openapi_schemas
from swarmq.proxy.dialects.base import (
    MAX_TOP_LOGPROBS,
    count,
    flag,
    object_list,
    options,
    refuse_fields,
    split_server_tools,
    string,
    top_logprobs,
)
from swarmq.proxy.dialects.openai_chunks import ChunkWriter, head, usage
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.proxy.http_errors import Refusal, RefusedError
from swarmq.proxy.requests import ChoiceDelta, ChoiceResult, DialectRequest

Json = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
CONTENT_SUBSTITUTES = ("tool_calls", "reasoning", "reasoning_content", "refusal", "function_call")
"""Fields that an assistant's message may have in place of content."""


class ChatCompletions:
    path = "/v1/chat/completions"
    summary = "OpenAI's chat completions"
    body = openapi_schemas.CHAT
    fields: frozenset[str] | None = known_parameters.CHAT

    def ask(self, body: Json, conversations: Conversations) -> DialectRequest:  # noqa: ARG002
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise RefusedError("messages must be a list of at least one message", param="messages")
        for at, message in enumerate(messages):
            _check_message(message, f"messages[{at}]")
        tools, left_out = split_server_tools(object_list(body, "tools"))
        for name in ("stream_options", "response_format"):
            options(body, name)
        if not isinstance(body.get("tool_choice"), str):
            options(body, "tool_choice")
        for name in ("logprobs", "parallel_tool_calls"):
            flag(body, name)
        count(body, "top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
        if body.get("stream_options") is not None and not flag(body, "stream"):
            raise RefusedError("stream_options is only allowed when stream is true", param="stream_options")
        refuse_fields(body, "functions", "function_call", why="use tools and tool_choice")
        refuse_fields(body, "audio", "web_search_options", why="the engine answers with text alone")
        if (body.get("modalities") or ["text"]) != ["text"]:
            raise RefusedError("modalities must be ['text']", code="unsupported_parameter", param="modalities")
        names = {"max_tokens": "max_completion_tokens"} if body.get("max_completion_tokens") else {}
        chat = {name: value for name, value in body.items() if name != "prompt"}
        if left_out:
            chat["tools"] = tools or None
            if not tools and chat.get("tool_choice") in ("auto", "none"):
                del chat["tool_choice"]
        return DialectRequest(chat=chat, names=names, left_out=left_out)

    def answer(self, begun: ActiveCall, choices: Sequence[ChoiceResult]) -> Json:
        return {
            **head(begun, "chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice.message),
                    "logprobs": _logprobs(begun, choice.entries),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage(begun, choices),
        }

    def writer(self, begun: ActiveCall) -> ChatWriter:
        return ChatWriter(begun)

    def refusal(self, refusal: Refusal) -> Json:
        return refusal.body


class ChatWriter(ChunkWriter):
    def __init__(self, begun: ActiveCall) -> None:
        super().__init__(begun, "chat.completion.chunk")
        self._asked_logprobs = bool(begun.request.chat.get("logprobs"))
        self._opened: set[int] = set()

    def gain(self, gain: ChoiceDelta) -> bytes:
        opening = self._open_choice(gain.index)
        if not gain.delta and not self._asked_logprobs:
            return opening
        delta = {key: value for key, value in gain.delta.items() if key != "role"}
        logprobs = _logprobs(self.begun, gain.logprobs)
        return opening + self.chunk({"index": gain.index, "delta": delta, "logprobs": logprobs, "finish_reason": None})

    def end(self, ended: ChoiceResult) -> bytes:
        self.ended.append(ended)
        why = {"finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}
        return self._open_choice(ended.index) + self.chunk({"index": ended.index, "delta": {}, "logprobs": None, **why})

    def _open_choice(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        opening = {"role": "assistant", "content": ""}
        return self.chunk({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})


def _check_message(message: Json, where: str) -> None:
    """Raise RefusedError for an unknown role, and for a message without any content."""
    role = string(message, "role", where)
    if role not in ROLES:
        raise RefusedError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r:.100}", param=f"{where}.role")
    content = message.get("content")
    if content is None and not (role == "assistant" and any(message.get(name) for name in CONTENT_SUBSTITUTES)):
        raise RefusedError(f"{where}.content is missing", code="missing_required_parameter", param=f"{where}.content")
    if content is not None and not isinstance(content, (str, list)):
        raise RefusedError(
            f"{where}.content must be text or a list of parts", code="invalid_type", param=f"{where}.content"
        )


def model_card(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "swarmq"}


def _message(message: Json) -> Json:
    return {**message, "content": message["content"] or (None if message.get("tool_calls") else ""), "refusal": None}


def _logprobs(begun: ActiveCall, logprobs: Sequence[Logprob]) -> Json | None:
    return {"content": top_logprobs(begun, logprobs)} if begun.request.chat.get("logprobs") else None
