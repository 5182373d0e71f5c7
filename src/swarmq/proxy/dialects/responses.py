"""OpenAI's responses: items in, items out, and conversations that are named instead of sent again.

input items ──> chat messages       consecutive reasoning, message and function_call items are one assistant message
assistant message ──> output items  reasoning, then message, then one function_call for each call
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from swarmq.engine.client.protocol import Logprob
from swarmq.messages import RESPONSE_ID_PREFIX
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.dialects import known_parameters, openapi_schemas
from swarmq.proxy.dialects.base import (
    MAX_TOP_LOGPROBS,
    answer_id,
    count,
    flag,
    flatten_parts,
    named_event,
    object_list,
    objects,
    options,
    refuse_fields,
    split_server_tools,
    string,
    top_logprobs,
)
from swarmq.proxy.dialects.known_parameters import UNKNOWN
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.proxy.http_errors import Refusal, RefusedError
from swarmq.proxy.requests import ChoiceDelta, ChoiceResult, DialectRequest, NamedConversation

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
SHARED_FIELDS = (
    *("temperature", "top_p", "parallel_tool_calls", "stream", "top_logprobs"),
    *("seed", "stop", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("structured_outputs", "chat_template_kwargs", "ignore_eos", "min_tokens", "stop_token_ids", "bad_words"),
)
"""Fields with the same meaning in both dialects, including those that only vLLM knows."""
FIELDS = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Field of a chat request -> its name in the Responses API."""
REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}
"""Fields of the request that a response repeats, with their defaults."""
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
PARTS = {"message": "content", "reasoning": "reasoning", "function_call": "tool_calls"}
"""Item type -> field of a chat message."""


class Responses:
    path = "/v1/responses"
    summary = "OpenAI's responses"
    body = openapi_schemas.RESPONSE
    fields: frozenset[str] | None = known_parameters.RESPONSE

    def ask(self, body: Json, conversations: Conversations) -> DialectRequest:
        refuse_fields(body, "background", why="an answer is returned or streamed by the request that asks for it")
        refuse_fields(body, "conversation", "prompt", why="only responses are stored; send the input itself")
        chat = {key: body[key] for key in SHARED_FIELDS if body.get(key) is not None}
        messages = [*_recall_history(body, conversations), *_items_to_messages(body.get("input"), conversations)]
        chat["messages"] = _with_instructions(body, messages)
        if limit := count(body, "max_output_tokens"):
            chat["max_tokens"] = limit
        given, left_out = split_server_tools(object_list(body, "tools"))
        if tools := [_tool(tool, namespace) for namespace, tool in _functions(given)]:
            chat["tools"] = tools
        choice = _tool_choice(body.get("tool_choice"))
        if choice is not None and (tools or choice not in ("auto", "none")):
            chat["tool_choice"] = choice
        if wanted := _format(options(options(body, "text"), "format")):
            chat["response_format"] = wanted
        if effort := options(body, "reasoning").get("effort"):
            chat["reasoning_effort"] = effort
        included = [] if body.get("include") is None else body["include"]
        if not isinstance(included, list):
            raise RefusedError("include must be a list", param="include")
        if LOGPROBS in included or count(body, "top_logprobs", low=0, high=MAX_TOP_LOGPROBS):
            chat["logprobs"] = True
        if body.get("truncation") not in (None, "auto", "disabled"):
            raise RefusedError("truncation must be auto or disabled", param="truncation")
        flag(body, "parallel_tool_calls")
        flag(body, "store")
        kept = (
            None
            if body.get("store") is False
            else NamedConversation(messages=messages, name=lambda call_id, _: call_id)
        )
        return DialectRequest(chat=chat, conversation=kept, names=FIELDS, left_out=left_out)

    def answer(self, begun: ActiveCall, choices: Sequence[ChoiceResult]) -> Json:
        [ended] = choices
        items = Items(begun)
        items.add(ended.message, ended.entries)
        return _finished(begun, items, ended)

    def writer(self, begun: ActiveCall) -> ResponseWriter:
        return ResponseWriter(begun)

    def refusal(self, refusal: Refusal) -> Json:
        param = refusal.param if refusal.code != UNKNOWN else None
        if param is None:
            return refusal.body
        return msgspec.structs.replace(refusal, param=FIELDS.get(param, param)).body


class Items:
    """Output items of a growing response. `emit`: called with every event."""

    def __init__(self, begun: ActiveCall, emit: Callable[[Json], None] = lambda _: None) -> None:
        self._begun = begun
        self._request_id = begun.request.request_id
        self._emit = emit
        self._open: int | None = None
        """Index of the growing item; None if there is none."""
        self._calls: dict[int, int] = {}
        """Index of a tool call within the message -> index of its item."""
        self._names = _functions_by_flat_name(begun.request.body)
        self.items: list[Json] = []

    def add(self, delta: Json, logprobs: Sequence[Logprob] = ()) -> None:
        """Add a delta of the assistant's message."""
        if thought := delta.get("reasoning"):
            self._opened("reasoning")["content"][0]["text"] += thought
            self._emit({"type": "response.reasoning_text.delta", **self._where(content_index=0), "delta": thought})
        if text := delta.get("content"):
            part = self._opened("message")["content"][0]
            entries = self._logprobs(logprobs)
            part["text"] += text
            part["logprobs"] += entries
            where = self._where(content_index=0)
            self._emit({"type": "response.output_text.delta", **where, "delta": text, "logprobs": entries})
        for position, call in enumerate(delta.get("tool_calls") or ()):
            self._call(call.get("index", position), call.get("id"), call.get("function") or {})

    def finish(self, *, cut: bool) -> None:
        """End the last item, or an empty message if there is none. `cut`: whether the answer ended before it was complete."""
        if not self.items:
            self._opened("message")
        self._close("incomplete" if cut else "completed")

    def parts(self) -> dict[str, tuple[str, int]]:
        """Return item id -> (field of the assistant's message, index among the items of that field)."""
        found: dict[str, tuple[str, int]] = {}
        fields: Counter[str] = Counter()
        for item in self.items:
            field = PARTS[item["type"]]
            found[item["id"]] = (field, fields[field])
            fields[field] += 1
        return found

    def _opened(self, kind: str) -> Json:
        """Return the growing item; if it is not of this kind, end it and begin a new one."""
        if self._open is None or self.items[self._open]["type"] != kind:
            part = _text("") if kind == "message" else {"type": "reasoning_text", "text": ""}
            more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._begin({"type": kind, **more, "content": []})
            self._emit({"type": "response.content_part.added", **self._where(content_index=0), "part": part})
            self.items[-1]["content"].append(part)
        return self.items[-1]

    def _call(self, index: int, identity: str | None, function: Json) -> None:
        if index not in self._calls:
            identity = identity or f"call_{self._request_id}_{index}"
            name = function.get("name") or ""
            names = self._names.get(name, {"name": name})
            self._begin({"type": "function_call", "call_id": identity, **names, "arguments": ""})
            self._calls[index] = len(self.items) - 1
        at = self._calls[index]
        if arguments := function.get("arguments"):
            self.items[at]["arguments"] += arguments
            where = {"item_id": self.items[at]["id"], "output_index": at}
            self._emit({"type": "response.function_call_arguments.delta", **where, "delta": arguments})

    def _begin(self, item: Json) -> None:
        self._close("completed")
        self._open = len(self.items)
        identity = f"{PREFIXES[item['type']]}_{self._request_id}_{self._open}"
        self.items.append({"id": identity, "status": "in_progress", **item})
        self._emit({"type": "response.output_item.added", "output_index": self._open, "item": self.items[-1]})

    def _close(self, status: str) -> None:
        if self._open is None:
            return
        item = self.items[self._open]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._emit({"type": "response.function_call_arguments.done", **self._where(), **done})
        else:
            [part] = item["content"]
            where = self._where(content_index=0)
            if item["type"] == "message":
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                self._emit({"type": "response.output_text.done", **where, **text})
            else:
                self._emit({"type": "response.reasoning_text.done", **where, "text": part["text"]})
            self._emit({"type": "response.content_part.done", **where, "part": part})
        self._emit({"type": "response.output_item.done", "output_index": self._open, "item": item})
        self._open = None

    def _where(self, **more: int) -> Json:
        assert self._open is not None
        return {"item_id": self.items[self._open]["id"], "output_index": self._open, **more}

    def _logprobs(self, logprobs: Sequence[Logprob]) -> list[Json]:
        if not self._begun.request.chat.get("logprobs"):
            return []
        entries = top_logprobs(self._begun, logprobs)
        return [{**msgspec.to_builtins(entry), "bytes": entry.bytes or []} for entry in entries]


class ResponseWriter:
    def __init__(self, begun: ActiveCall) -> None:
        self._begun = begun
        self._items = Items(begun, self._emit)
        self._pending: list[bytes] = []
        self._count = 0

    def begin(self) -> bytes:
        for name in ("response.created", "response.in_progress"):
            self._emit({"type": name, "response": response(self._begun, [])})
        return self._flush()

    def gain(self, gain: ChoiceDelta) -> bytes:
        self._items.add(gain.delta, gain.logprobs)
        return self._flush()

    def end(self, ended: ChoiceResult) -> bytes:
        whole = _finished(self._begun, self._items, ended)
        self._emit({"type": f"response.{whole['status']}", "response": whole})
        return self._flush()

    def close(self) -> bytes:
        return b""

    def fail(self, refusal: Refusal) -> bytes:
        error = {"code": "server_error", "message": refusal.message}
        failed = {**response(self._begun, self._items.items), "status": "failed", "error": error}
        self._emit({"type": "response.failed", "response": failed})
        return self._flush()

    def _emit(self, event: Json) -> None:
        self._pending.append(named_event({**event, "sequence_number": self._count}))
        self._count += 1

    def _flush(self) -> bytes:
        pending, self._pending = b"".join(self._pending), []
        return pending


def response(
    begun: ActiveCall, output: Sequence[Json], *, status: str = "in_progress", usage: Json | None = None
) -> Json:
    body, sampling = begun.request.body, begun.request.sampling
    return {
        "id": RESPONSE_ID_PREFIX + answer_id(begun),
        "object": "response",
        "created_at": int(begun.request.began_at),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": begun.request.policy,
        "output": output,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "truncation": "disabled",  # also if `auto` was requested: a truncated conversation could not be continued
        "usage": usage,
        **{key: default if body.get(key) is None else body[key] for key, default in REPEATED.items()},
    }


def _finished(begun: ActiveCall, items: Items, ended: ChoiceResult) -> Json:
    cut = ended.finish_reason == "length"
    items.finish(cut=cut)
    if begun.request.conversation:
        begun.memory.conversations.keep_parts(answer_id(begun), items.parts())
    usage = {
        "input_tokens": begun.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": ended.num_tokens,
        "output_tokens_details": {"reasoning_tokens": ended.num_reasoning_tokens},
        "total_tokens": begun.prompt_tokens + ended.num_tokens,
    }
    return response(begun, items.items, status="incomplete" if cut else "completed", usage=usage)


def _text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _with_instructions(body: Json, messages: list[Json]) -> list[Json]:
    """Return the messages with the request's instructions first. Later responses do not inherit the instructions."""
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise RefusedError("instructions must be text", param="instructions")
    if instructions:
        first = messages[0] if messages else {}
        if first.get("role") == "system" and isinstance(first["content"], str):
            # Many chat templates accept only one system message, at the beginning.
            return [{"role": "system", "content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
        messages = [{"role": "system", "content": instructions}, *messages]
    if not messages:
        raise RefusedError("input must have at least one item", param="input")
    return messages


def _recall_history(body: Json, conversations: Conversations) -> list[Json]:
    """Return the conversation that the request continues."""
    name = body.get("previous_response_id")
    if name is None:
        return []
    messages = conversations.recall(name.removeprefix(RESPONSE_ID_PREFIX)) if isinstance(name, str) else None
    if messages is None:
        raise RefusedError(
            f"response {name!r:.100} is not known to this proxy: send the whole input instead",
            code="previous_response_not_found", param="previous_response_id",
        )  # fmt: skip
    return messages


def _items_to_messages(given: Any, conversations: Conversations) -> list[Json]:
    """Return items as chat messages. Consecutive items of the assistant are one message, which ends with its calls."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    growing = False
    for at, item in enumerate(objects(given if given is not None else [], "input")):
        where = f"input[{at}]"
        message = _recall_item(item, conversations) if _is_reference(item) else _message(item, where)
        if message["role"] == "assistant":
            last = messages[-1] if growing else {}
            begins = message["content"] or "reasoning" in message
            if growing and not (begins and (last["content"] or last.get("tool_calls"))):
                _join(last, message)
            else:
                messages.append(message)
            growing = True
        else:
            messages.append(message)
            growing = False
    return messages


def _is_reference(item: Json) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _recall_item(item: Json, conversations: Conversations) -> Json:
    """Return the stored item of an earlier answer to which `item` refers by id. Raises RefusedError if there is none."""
    name = item.get("id")
    message = conversations.recall_part(name) if isinstance(name, str) else None
    if message is None:
        raise RefusedError(
            f"Item with id {name!r:.100} not found: no stored answer of the episode has it; send the item itself",
            status=404, code=None, param="input",
        )  # fmt: skip
    return message


def _join(message: Json, more: Json) -> None:
    message["content"] = message["content"] or more["content"]
    for key, empty in (("reasoning", ""), ("tool_calls", [])):
        if key in more:
            message[key] = message.get(key, empty) + more[key]


def _message(item: Json, where: str) -> Json:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ROLES:
                raise RefusedError(f"role must be one of {', '.join(ROLES)}", param=f"{where}.role")
            return {"role": ROLES[role], "content": _content(item.get("content"), f"{where}.content")}
        case "function_call":
            name = _flat_name(item.get("namespace"), string(item, "name", where))
            call = {"name": name, "arguments": string(item, "arguments", where)}
            called = [{"id": string(item, "call_id", where), "type": "function", "function": call}]
            return {"role": "assistant", "content": "", "tool_calls": called}
        case "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            return {"role": "tool", "tool_call_id": string(item, "call_id", where), "content": content}
        case "reasoning":
            parts = objects(item.get("content") or item.get("summary") or [], f"{where}.content")
            return {"role": "assistant", "content": "", "reasoning": "".join(str(p.get("text", "")) for p in parts)}
        case other:
            served = "message, function_call, function_call_output, reasoning, item_reference"
            raise RefusedError(f"items of type {other!r:.100} are not served, only {served}", param=f"{where}.type")


def _content(content: Any, where: str) -> str | list[Json]:
    """Return text if the content is only text, else a list of parts as in a chat message."""
    if isinstance(content, str):
        return content
    return flatten_parts([_part(part, where) for part in objects(content, where)])


def _part(part: Json, where: str) -> Json:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": string(part, "text", where)}
        case "refusal":
            return {"type": "text", "text": string(part, "refusal", where)}
        case "input_image":
            return {"type": "image_url", "image_url": {"url": string(part, "image_url", where)}}
        case other:
            raise RefusedError(f"content of type {other!r:.100} is not served, only text and images", param=where)


def _functions(tools: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    """Yield every function with its namespace, "" for none. Raises RefusedError for tools that are not functions."""
    for tool in tools:
        namespace, inner = "", [tool]
        if tool.get("type") == "namespace":
            namespace, inner = string(tool, "name", "tools"), objects(tool.get("tools"), "tools")
        for function in inner:
            if function.get("type") != "function":
                raise RefusedError(
                    f"tools of type {function.get('type')!r:.100} are not served, only functions that the agent runs itself",
                    code="unsupported_tool", param="tools",
                )  # fmt: skip
            string(function, "name", "tools")
            yield namespace, function


def _functions_by_flat_name(body: Json) -> dict[str, Json]:
    """Return the functions in namespaces: flat name -> fields by which the agent knows the function."""
    named = _functions([tool for tool in body.get("tools") or () if tool.get("type") == "namespace"])
    return {_flat_name(space, tool["name"]): {"namespace": space, "name": tool["name"]} for space, tool in named}


def _flat_name(namespace: Any, name: str) -> str:
    """Return the model's name of a function, as vLLM flattens namespaces."""
    return f"{namespace}__{name}" if namespace else name


def _tool(tool: Json, namespace: str) -> Json:
    function = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": _flat_name(namespace, tool["name"]), **function}}


def _tool_choice(choice: Any) -> Any:
    if choice in (None, "auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _flat_name(choice.get("namespace"), string(choice, "name", "tool_choice"))
        return {"type": "function", "function": {"name": name}}
    raise RefusedError("tool_choice must be auto, none, required or a function's name", param="tool_choice")


def _format(wanted: Json) -> Json | None:
    match wanted.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            schema = {key: wanted[key] for key in ("name", "description", "schema", "strict") if key in wanted}
            return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
        case other:
            raise RefusedError(f"text.format of type {other!r:.100} is not served", param="text.format")
