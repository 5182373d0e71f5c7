"""Anthropic's messages: content blocks in, content blocks out.

blocks ──> chat messages        tool results become tool messages, thinking becomes the message's reasoning
assistant message ──> blocks    thinking, then text, then one tool_use for each call
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.dialects import openapi_schemas
from swarmq.proxy.dialects.base import (
    answer_id,
    flatten_parts,
    named_event,
    object_list,
    objects,
    options,
    refuse_fields,
    split_server_tools,
    string,
)
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.proxy.http_errors import Refusal, RefusedError
from swarmq.proxy.requests import ChoiceDelta, ChoiceResult, DialectRequest

Json = dict[str, Any]

ANTHROPIC = "anthropic-version"
"""Header that Anthropic's client libraries always send."""
ERROR = "Error: "
SHARED_FIELDS = (
    *("temperature", "top_p", "top_k", "stream"),
    *("seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("structured_outputs", "chat_template_kwargs", "ignore_eos", "min_tokens", "stop_token_ids", "bad_words"),
)
"""Fields with the same meaning in both dialects, including those that only vLLM knows."""
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    503: "overloaded_error",
}
NEUTRAL_EDITS = ({"type": "clear_thinking_20251015", "keep": "all"},)
"""Context edits that leave a conversation unchanged."""
MODEL: Json = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
"""Fields that are the same for all models; a policy has no release date."""
SERVED = "text, image, tool_use, tool_result, thinking"


class Messages:
    path = "/v1/messages"
    summary = "Anthropic's messages"
    body = openapi_schemas.MESSAGE
    fields: frozenset[str] | None = None

    def ask(self, body: Json, conversations: Conversations) -> DialectRequest:  # noqa: ARG002
        if body.get("max_tokens") is None:
            raise RefusedError("max_tokens is required", param="max_tokens")
        chat = prompt_of(body) | {"max_tokens": body["max_tokens"]}
        chat |= {key: body[key] for key in SHARED_FIELDS if body.get(key) is not None}
        stops = body.get("stop_sequences")
        if stops is not None and not isinstance(stops, list):
            raise RefusedError("stop_sequences must be a list", param="stop_sequences")
        if stops:
            chat["stop"] = stops
        _, left_out = split_server_tools(object_list(body, "tools"))
        return DialectRequest(chat=chat, names={"thinking_token_budget": "thinking"}, cuts=True, left_out=left_out)

    def answer(self, begun: ActiveCall, choices: Sequence[ChoiceResult]) -> Json:
        [ended] = choices
        message = _present(ended.message)
        blocks: list[Json] = []
        if thought := message.get("reasoning"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": answer_id(begun)})
        if text := message.get("content"):
            blocks.append({"type": "text", "text": text})
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            identity = call.get("id") or _call_id(begun, index)
            blocks.append(
                {"type": "tool_use", "id": identity, "name": function["name"], "input": _input(function["arguments"])}
            )
        return _message(begun, blocks) | _explain_stop(begun, ended) | {"usage": _usage(begun, ended.num_tokens)}

    def writer(self, begun: ActiveCall) -> MessageWriter:
        return MessageWriter(begun)

    def refusal(self, refusal: Refusal) -> Json:
        fallback = "api_error" if refusal.status >= 500 else "invalid_request_error"
        named_already = refusal.param is None or refusal.param in refusal.message
        message = refusal.message if named_already else f"{refusal.param}: {refusal.message}"
        if refusal.code == "context_length_exceeded":
            message = f"prompt is too long: {refusal.message}"  # Anthropic's clients look for this beginning
        return {"type": "error", "error": {"type": ERRORS.get(refusal.status, fallback), "message": message}}


class CountTokens(Messages):
    path = "/v1/messages/count_tokens"
    summary = "How many tokens a prompt of Anthropic's messages has"
    body = openapi_schemas.COUNT_TOKENS

    def ask(self, body: Json, conversations: Conversations) -> DialectRequest:  # noqa: ARG002
        _, left_out = split_server_tools(object_list(body, "tools"))
        return DialectRequest(chat=prompt_of(body), left_out=left_out)


class MessageWriter:
    """Writer of an answer as a stream of Anthropic's events, with one open content block at a time.

    White space before a tool call is held back, because the chat template puts it there.
    """

    def __init__(self, begun: ActiveCall) -> None:
        self._begun = begun
        self._pending: list[bytes] = []
        self._count = 0
        self._open: str | int | None = None
        """The open content block: `thinking`, `text`, or the index of a tool call; None if no block is open."""
        self._blank = ""

    def begin(self) -> bytes:
        message = _message(self._begun, []) | {"stop_reason": None, "stop_sequence": None}
        return named_event({"type": "message_start", "message": message | {"usage": _usage(self._begun, 0)}})

    def gain(self, gain: ChoiceDelta) -> bytes:
        if thought := gain.delta.get("reasoning"):
            self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._delta({"type": "thinking_delta", "thinking": thought})
        if text := gain.delta.get("content"):
            self._text(text)
        for position, call in enumerate(gain.delta.get("tool_calls") or ()):
            self._call(call.get("index", position), call.get("id"), call.get("function") or {})
        return self._flush()

    def end(self, ended: ChoiceResult) -> bytes:
        if self._count == 0 and self._blank:
            self._blank, blank = "", self._blank
            self._ensure("text", {"type": "text", "text": ""})
            self._delta({"type": "text_delta", "text": blank})
        self._close()
        usage = _usage(self._begun, ended.num_tokens)
        self._emit({"type": "message_delta", "delta": _explain_stop(self._begun, ended), "usage": usage})
        self._emit({"type": "message_stop"})
        return self._flush()

    def close(self) -> bytes:
        return b""

    def fail(self, refusal: Refusal) -> bytes:
        return named_event(Messages().refusal(refusal))

    def _text(self, text: str) -> None:
        if self._open != "text" and not text.strip():
            self._blank += text
            return
        text, self._blank = self._blank + text, ""
        self._ensure("text", {"type": "text", "text": ""})
        self._delta({"type": "text_delta", "text": text})

    def _call(self, index: int, identity: str | None, function: Json) -> None:
        identity = identity or _call_id(self._begun, index)
        self._ensure(index, {"type": "tool_use", "id": identity, "name": function.get("name") or "", "input": {}})
        if arguments := function.get("arguments"):
            self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _ensure(self, what: str | int, block: Json) -> None:
        if self._open == what:
            return
        self._close()
        self._open = what
        self._emit({"type": "content_block_start", "index": self._count, "content_block": block})

    def _close(self) -> None:
        if self._open is None:
            return
        if self._open == "thinking":
            self._delta({"type": "signature_delta", "signature": answer_id(self._begun)})
        self._emit({"type": "content_block_stop", "index": self._count})
        self._count += 1
        self._open = None

    def _delta(self, delta: Json) -> None:
        self._emit({"type": "content_block_delta", "index": self._count, "delta": delta})

    def _emit(self, event: Json) -> None:
        self._pending.append(named_event(event))

    def _flush(self) -> bytes:
        pending, self._pending = b"".join(self._pending), []
        return pending


def prompt_of(body: Json) -> Json:
    """Return the fields of a request that determine its prompt: messages, tools, and tool choice."""
    refuse_fields(body, "container", "mcp_servers", why="the agent runs its tools itself")
    edits = objects(options(body, "context_management").get("edits") or [], "context_management")
    if any(edit not in NEUTRAL_EDITS for edit in edits):
        raise RefusedError(
            "context_management is not served: the conversation is used as it was sent",
            code="unsupported_parameter", param="context_management",
        )  # fmt: skip
    chat: Json = {"messages": [*_system(body.get("system")), *_conversation(body.get("messages"))]}
    tools, left_out = split_server_tools(object_list(body, "tools"))
    if tools:
        chat["tools"] = [_tool(tool) for tool in tools]
    choice = _tool_choice(options(body, "tool_choice"))
    chat |= {} if left_out and not tools and choice.get("tool_choice") in (None, "none") else choice
    output = options(body, "output_config")
    if wanted := options(output, "format") or options(body, "output_format"):
        chat["response_format"] = {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.get("schema")},
        }  # fmt: skip
    if output.get("effort"):
        chat["reasoning_effort"] = output["effort"]
    thinking = options(body, "thinking")
    if thinking.get("type") == "enabled":
        chat["thinking_token_budget"] = thinking.get("budget_tokens")
    elif thinking.get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    if not chat["messages"]:
        raise RefusedError("messages is empty: send at least one message with content", param="messages")
    if chat["messages"][-1]["role"] == "assistant":  # the model continues the given beginning of its answer
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _system(system: Any) -> list[Json]:
    blocks = [{"text": system}] if isinstance(system, str) else [] if system is None else objects(system, "system")
    text = "".join(string(block, "text", "system") for block in blocks)
    return [{"role": "system", "content": text}] if text else []


def _conversation(messages: Any) -> list[Json]:
    if not messages:
        raise RefusedError("messages must be a list of at least one message", param="messages")
    chat_messages: list[Json] = []
    for at, message in enumerate(objects(messages, "messages")):
        where = f"messages[{at}]"
        role, content = message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, where)
        if role == "assistant":
            chat_messages.append(_to_assistant_message(blocks, where))
        elif role in ("user", "system"):
            chat_messages += _to_user_messages(role, blocks, where)
        else:
            raise RefusedError("role must be user, assistant or system", param=f"{where}.role")
    return chat_messages


def _to_assistant_message(blocks: Sequence[Json], where: str) -> Json:
    """Return an assistant's message from content blocks."""
    message: Json = {"role": "assistant", "content": ""}
    calls: list[Json] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                message["content"] += string(block, "text", where)
            case "thinking":
                message["reasoning"] = message.get("reasoning", "") + str(block.get("thinking", ""))
            case "redacted_thinking":
                pass  # encrypted, so nothing of it can be shown to the model
            case "tool_use":
                arguments = msgspec.json.encode(options(block, "input")).decode()
                function = {"name": string(block, "name", where), "arguments": arguments}
                calls.append({"id": string(block, "id", where), "type": "function", "function": function})
            case other:
                raise _not_a_block(other, where)
    return {**message, "tool_calls": calls} if calls else message


def _to_user_messages(role: str, blocks: Sequence[Json], where: str) -> list[Json]:
    """Return the chat messages of a user's content blocks: the results of tools, then everything else."""
    results: list[Json] = []
    parts: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": string(block, "tool_use_id", where), "content": _result(block, where)}
            )
        else:
            parts.append(_part(block, where))
    return [*results, {"role": role, "content": flatten_parts(parts)}] if parts else results


def _result(block: Json, where: str) -> str | list[Json]:
    content = block.get("content") or ""
    given = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, where)
    parts = [_part(part, where) for part in given]
    if block.get("is_error"):
        head = parts.pop(0)["text"] if parts and parts[0]["type"] == "text" else ""
        parts.insert(0, {"type": "text", "text": ERROR + head.removeprefix(ERROR)})
    return flatten_parts(parts)


def _part(block: Json, where: str) -> Json:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": string(block, "text", where)}
        case "image":
            source = options(block, "source")
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case other:
            raise _not_a_block(other, where)


def model_card(name: str) -> Json:
    return {**MODEL, "id": name, "display_name": name}


def model_cards(names: Sequence[str]) -> Json:
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return {"data": [model_card(name) for name in names], "has_more": False, **ends}


def _tool(tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise RefusedError(
            f"tools of type {tool['type']!r:.100} are not served, only those that the agent runs itself", param="tools"
        )
    function = {"name": string(tool, "name", "tools"), "parameters": options(tool, "input_schema")}
    given = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, **given}}


def _tool_choice(choice: Json) -> Json:
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    match choice.get("type", "auto"):
        case "auto":
            return parallel
        case "any":
            return {"tool_choice": "required", **parallel}
        case "none":
            return {"tool_choice": "none"}
        case "tool":
            name = string(choice, "name", "tool_choice")
            return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}
        case _:
            raise RefusedError("tool_choice.type must be auto, any, tool or none", param="tool_choice")


def _message(begun: ActiveCall, content: list[Json]) -> Json:
    return {
        "id": answer_id(begun),
        "type": "message",
        "role": "assistant",
        "model": begun.request.policy,
        "content": content,
    }


def _usage(begun: ActiveCall, sampled: int) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": begun.prompt_tokens, **cached, "output_tokens": sampled}


def _explain_stop(begun: ActiveCall, ended: ChoiceResult) -> Json:
    met = ended.stop_reason if isinstance(ended.stop_reason, str) else None
    if ended.finish_reason == "length":
        ours = "max_tokens" in begun.request.overridden  # clients take `max_tokens` for the limit that the agent set
        return {"stop_reason": "model_context_window_exceeded" if ours else "max_tokens", "stop_sequence": None}
    if ended.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if met else "end_turn", "stop_sequence": met}


def _present(message: Json) -> Json:
    """Return the message without white space between reasoning and a tool call."""
    blank = not (message.get("content") or "").strip() and (message.get("tool_calls") or message.get("reasoning"))
    return {**message, "content": ""} if blank else message


def _input(arguments: str) -> Any:
    """Return a tool call's arguments as an object, as agents expect; text that is not a JSON object becomes the
    object's field `arguments`."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        if isinstance(parsed := msgspec.json.decode(arguments), dict):
            return parsed
    return {"arguments": arguments}


def _call_id(begun: ActiveCall, index: int) -> str:
    return f"toolu_{begun.request.request_id}_{index}"


def _not_a_block(kind: Any, where: str) -> RefusedError:
    return RefusedError(f"content blocks of type {kind!r:.100} are not served here, only {SERVED}", param=where)
