"""The interface of a dialect: translates its requests into chat requests, and answers into its own form, whole or streamed.

  body ──Dialect.ask──> chat request ──> Completions ──┬─> choices ──Dialect.answer──> body
                                                       └─> deltas  ──Writer──────────> server-sent events

Everything between is the same for all dialects: render, stitch, generate, derender, record.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import msgspec
import structlog

from swarmq.engine.client.protocol import Logprob
from swarmq.keys import Claims
from swarmq.messages import OBSERVED_HEADER, new_id
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.dialects.body_checks import check_arguments, check_results, decode_object
from swarmq.proxy.dialects.grammar_checks import check_schemas
from swarmq.proxy.dialects.known_parameters import refuse, unknown
from swarmq.proxy.dialects.media_checks import check_media
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.proxy.http_errors import Refusal, RefusedError
from swarmq.proxy.requests import (
    ChoiceDelta,
    ChoiceResult,
    DialectRequest,
    RequestContext,
    check_supported,
    list_ignored_parameters,
)
from swarmq.proxy.sampling_params import check_limits

Json = dict[str, Any]
log = structlog.get_logger()

_canonical = msgspec.json.Encoder(order="deterministic")
MAX_RETRIES_TOLD = 1000
MAX_TOP_LOGPROBS = 20
SERVER_TOOLS = re.compile(
    r"(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|tool_search|advisor)"
)
"""Pattern of the types of tools that a provider runs, in OpenAI's and Anthropic's APIs."""
AGENT = re.compile(r"[\w.:/-]{1,64}", re.ASCII)
"""Pattern of agent tags."""


class Dialect(Protocol):
    """The requests and answers of one API. `path`: its route; `summary` and `body`: for the OpenAPI document."""

    path: str
    summary: str
    body: Json
    """JSON schema of a request."""
    fields: frozenset[str] | None
    """All known parameters; None: any parameter is accepted."""

    def ask(self, body: Json, conversations: Conversations) -> DialectRequest:
        """Translate a request into a chat request. `conversations`: stored conversations of the episode. Raises
        RefusedError, which names the field."""

    def answer(self, begun: ActiveCall, choices: Sequence[ChoiceResult]) -> Json:
        """Return the body of an unstreamed answer."""

    def writer(self, begun: ActiveCall) -> Writer:
        """Return the writer of a streamed answer."""

    def refusal(self, refusal: Refusal) -> Json:
        """Return the body of an error."""


class Writer(Protocol):
    """Server-sent events of one answer. Every method returns the bytes to send now, or b""."""

    def begin(self) -> bytes: ...

    def gain(self, gain: ChoiceDelta) -> bytes: ...

    def end(self, ended: ChoiceResult) -> bytes:
        """Return the events for a complete and recorded choice."""

    def close(self) -> bytes:
        """Return the events after all choices."""

    def fail(self, refusal: Refusal) -> bytes:
        """Return the events of an error, after which nothing follows."""


def read_request(
    dialect: Dialect,
    raw: bytes,
    claims: Claims,
    headers: Mapping[str, str],
    conversations: Conversations,
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    remote_images: bool = False,
    refuses_tools: bool = False,
    refuses_unknown: bool = True,
) -> RequestContext:
    """Check a request's body and return its context.

    `headers`: those of the request. `aliases`: policy -> further model names. `refuses_tools`: whether to refuse tools that a
    provider would run. `refuses_unknown`: whether to refuse unknown parameters, which are left out otherwise. Raises
    RefusedError for an invalid request, or a model that the key does not permit.
    """
    body = decode_object(raw)
    unknown_fields = unknown(body, dialect.fields) if dialect.fields else ()
    if unknown_fields and refuses_unknown:
        raise refuse(unknown_fields[0], dialect.fields or frozenset())
    ask = dialect.ask({name: value for name, value in body.items() if name not in unknown_fields}, conversations)
    chat = {name: value for name, value in ask.chat.items() if value is not None}
    if ask.left_out and refuses_tools:
        raise RefusedError(
            f"tools of type {', '.join(ask.left_out)} are not served: only a provider could run them (proxy.server_tools)",
            code="unsupported_tool", param="tools",
        )  # fmt: skip
    if ask.left_out and not chat.get("tools") and chat.get("tool_choice") not in (None, "auto", "none"):
        raise RefusedError(
            f"tool_choice asks for a tool, and none is left: only a provider could run {', '.join(ask.left_out)}",
            code="unsupported_tool", param="tool_choice",
        )  # fmt: skip
    check_arguments(chat["messages"])
    check_results(chat["messages"])
    check_supported(body)
    check_limits(chat)
    check_schemas(chat)
    check_media(chat, remote=remote_images)
    agent = headers.get("x-swarmq-agent")
    if agent is not None and not AGENT.fullmatch(agent):
        raise RefusedError(f"x-swarmq-agent must match {AGENT.pattern}", param="x-swarmq-agent")
    retry = headers.get("x-stainless-retry-count", "")
    counts_retries = retry.isdecimal() and retry.isascii()
    return RequestContext(
        claims=claims,
        policy=_policy(body, claims, aliases or {}),
        request_id=new_id(),
        body=body,
        chat=chat,
        stream=flag(body, "stream"),
        retry=min(int(retry), MAX_RETRIES_TOLD) if counts_retries else 0,
        counts_retries=counts_retries,
        observed=OBSERVED_HEADER in headers,
        request_digest=hashlib.sha256(_canonical.encode(body)).hexdigest(),
        agent=agent or claims.agent,
        conversation=ask.conversation,
        names=ask.names,
        cuts=ask.cuts,
        left_out=(*unknown_fields, *(f"tools.{kind}" for kind in ask.left_out)),
        began_at=time.time(),
        began=time.monotonic(),
    )


def response_headers(begun: ActiveCall) -> dict[str, str]:
    call = begun.request
    headers = {
        **request_headers(call.request_id),
        "x-swarmq-call-id": ", ".join(map(begun.request.call_id, range(begun.request.num_choices))),
    }
    overridden = [*begun.request.overridden, *list_ignored_parameters(call.body), *call.left_out]
    return {**headers, "x-swarmq-overridden": ", ".join(overridden)} if overridden else headers


def request_headers(request_id: str) -> dict[str, str]:
    """Return the headers by which OpenAI's and Anthropic's libraries identify a request."""
    return {"x-request-id": request_id, "request-id": request_id}


def data_event(value: Json) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: Json) -> bytes:
    """Return a server-sent event named by the value's `type`."""
    return f"event: {value['type']}\n".encode() + data_event(value)


def answer_id(begun: ActiveCall) -> str:
    """Return the id of an answer: the call id if there is one choice, so that an agent can name the call that it rewards; otherwise
    the request id."""
    request = begun.request
    return request.call_id(0) if request.num_choices == 1 else request.request_id


def top_logprobs(begun: ActiveCall, logprobs: Sequence[Logprob]) -> list[Logprob]:
    """Return log-probabilities with as many alternatives as the agent asked for."""
    top = begun.request.chat.get("top_logprobs") or 0
    return [msgspec.structs.replace(entry, top_logprobs=entry.top_logprobs[:top]) for entry in logprobs]


def flag(body: Json, name: str) -> bool:
    """Return a true-or-false field; False if it is absent. Raises RefusedError for any other value."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name} must be true or false", param=name)
    return bool(value)


def count(body: Json, name: str, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
    """Return a field that is a whole number from `low` to `high`; None if it is absent. Raises RefusedError for any other value."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise RefusedError(f"{name} must be a whole number from {low} to {high}, not {_short(value)}", param=name)
    return value


def _short(value: Any) -> str:
    return f"{value!r:.100}"


def options(body: Json, name: str) -> Json:
    """Return a field that is an object; {} if it is absent. Raises RefusedError for any other value."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RefusedError(f"{name} must be an object", param=name)
    return value or {}


def objects(value: Any, param: str) -> list[Json]:
    """Return `value` if it is a list of objects; else raise RefusedError, which names the field `param`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RefusedError(f"{param} must be a list of objects", param=param)
    return value


def split_server_tools(tools: Sequence[Json]) -> tuple[list[Json], tuple[str, ...]]:
    """Return the tools that the agent runs itself, and the types of the tools that a provider would run."""
    theirs = [SERVER_TOOLS.match(str(tool.get("type"))) for tool in tools]
    left_out = dict.fromkeys(match[0] for match in theirs if match)
    return [tool for tool, match in zip(tools, theirs, strict=True) if not match], tuple(left_out)


def object_list(body: Json, name: str) -> list[Json]:
    """Return a field that is a list of objects; [] if it is absent. Raises RefusedError for any other value."""
    value = body.get(name)
    return [] if value is None else objects(value, name)


def string(value: Json, name: str, where: str) -> str:
    """Return the field `name` of `value`. Raises RefusedError if it is not text; `where`: path of `value` in the request."""
    text = value.get(name)
    if not isinstance(text, str):
        raise RefusedError(f"{where}.{name} must be text", param=where)
    return text


def flatten_parts(parts: list[Json]) -> str | list[Json]:
    """Return the parts of a chat message, as text if they are only text, which every template understands."""
    return "\n".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def refuse_fields(body: Json, *names: str, why: str) -> None:
    """Raise RefusedError if the body has one of these fields."""
    for name in names:
        if body.get(name):
            raise RefusedError(f"{name} is not supported: {why}", code="unsupported_parameter", param=name)


def policy_of(model: str, policies: Sequence[str], aliases: Mapping[str, Sequence[str]]) -> str | None:
    """Return the policy with this name or alias, or None."""
    if model in policies:
        return model
    return next((one for one in policies if any(fnmatchcase(model, alias) for alias in aliases.get(one, ()))), None)


def _policy(body: Json, claims: Claims, aliases: Mapping[str, Sequence[str]]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RefusedError("you must provide a model parameter: the name of a policy", param="model")
    if (policy := policy_of(model, claims.policies, aliases)) is not None:
        return policy
    known = ", ".join(claims.policies)
    raise RefusedError(
        f"model {model!r:.200} is neither one of this key's policies ({known}) nor an alias of one (policies.X.aliases)",
        status=404, code="model_not_found", param="model",
    )  # fmt: skip
