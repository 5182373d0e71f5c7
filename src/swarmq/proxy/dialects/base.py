"""What a dialect is: a request of its own form -> a chat request, and an answer -> its own form, whole or streamed.

    body ──Dialect.ask──> chat request ──> Completions ──┬─> choices ──Dialect.answer──> body
                                                         └─> gains   ──Writer──────────> server-sent events

Everything between is the same for all: render, stitch, generate, derender, record.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from fnmatch import fnmatchcase
from typing import Any, Protocol

import msgspec
import structlog

from swarmq.engine.client.protocol import Logprob
from swarmq.keys import Claims
from swarmq.messages import OBSERVED_HEADER, new_id
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.counters import Counters
from swarmq.proxy.dialects.body_checks import check_arguments, check_results, object_of
from swarmq.proxy.dialects.grammar_checks import check_schemas
from swarmq.proxy.dialects.known_parameters import refuse, unknown
from swarmq.proxy.dialects.media_checks import check_media
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.proxy.http_errors import Refusal, RefusedError, to_refusal
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
"""How the types of tools begin that a provider runs, in OpenAI's and Anthropic's APIs."""
AGENT = re.compile(r"[\w.:/-]{1,64}", re.ASCII)
"""What an agent may call itself."""


class Dialect(Protocol):
    """One form of asking. `path` is where it is asked, `summary` and `body` are for the OpenAPI document."""

    path: str
    summary: str
    body: Json
    """JSON schema of a request."""
    fields: frozenset[str] | None
    """All parameters that there are; None: any may come."""

    def ask(self, body: Json, told: Conversations) -> DialectRequest:
        """The request as a chat request. `told`: what the episode has said. Raises RefusedError, naming the field."""

    def answer(self, begun: ActiveCall, choices: Sequence[ChoiceResult]) -> Json:
        """The body of an answer that is not streamed."""

    def writer(self, begun: ActiveCall) -> Writer:
        """For an answer that is streamed."""

    def refusal(self, refusal: Refusal) -> Json:
        """The body of an error."""


class Writer(Protocol):
    """Server-sent events of one answer. Every method returns the bytes to send now, b"" for none."""

    def begin(self) -> bytes: ...

    def gain(self, gain: ChoiceDelta) -> bytes: ...

    def end(self, ended: ChoiceResult) -> bytes:
        """A choice is complete and recorded."""

    def close(self) -> bytes:
        """All choices are."""

    def fail(self, refusal: Refusal) -> bytes:
        """Nothing follows."""


def read(
    dialect: Dialect,
    raw: bytes,
    claims: Claims,
    told: Mapping[str, str],
    conversations: Conversations,
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    remote_images: bool = False,
    refuses_tools: bool = False,
    refuses_unknown: bool = True,
) -> RequestContext:
    """`told`: the request's headers. `aliases`: policy -> other names that it goes by. `refuses_tools`: that a provider would run.
    `refuses_unknown`: parameters, which are left out otherwise.

    Raises RefusedError for what cannot be meant, or a model that the key does not permit.
    """
    body = object_of(raw)
    strange = unknown(body, dialect.fields) if dialect.fields else ()
    if strange and refuses_unknown:
        raise refuse(strange[0], dialect.fields or frozenset())
    ask = dialect.ask({name: value for name, value in body.items() if name not in strange}, conversations)
    chat = {name: value for name, value in ask.chat.items() if value is not None}
    if ask.left_out and refuses_tools:
        raise RefusedError(
            f"tools of type {', '.join(ask.left_out)} are not served: only a provider could run them (proxy.server_tools)",
            code="unsupported_tool", param="tools",
        )  # fmt: skip
    check_arguments(chat["messages"])
    check_results(chat["messages"])
    check_supported(body)
    check_limits(chat)
    check_schemas(chat)
    check_media(chat, remote=remote_images)
    agent = told.get("x-swarmq-agent")
    if agent is not None and not AGENT.fullmatch(agent):
        raise RefusedError(f"x-swarmq-agent must match {AGENT.pattern}", param="x-swarmq-agent")
    retry = told.get("x-stainless-retry-count", "")
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
        observed=OBSERVED_HEADER in told,
        request_digest=hashlib.sha256(_canonical.encode(body)).hexdigest(),
        agent=agent or claims.agent,
        conversation=ask.conversation,
        names=ask.names,
        cuts=ask.cuts,
        left_out=(*strange, *(f"tools.{kind}" for kind in ask.left_out)),
        began_at=time.time(),
        began=time.monotonic(),
    )


def headers(begun: ActiveCall) -> dict[str, str]:
    call = begun.request
    told = {
        **request_headers(call.request_id),
        "x-swarmq-call-id": ", ".join(map(begun.request.call_id, range(begun.request.num_choices))),
    }
    overridden = [*begun.request.overridden, *list_ignored_parameters(call.body), *call.left_out]
    return {**told, "x-swarmq-overridden": ", ".join(overridden)} if overridden else told


def request_headers(request_id: str) -> dict[str, str]:
    """By which OpenAI's and Anthropic's libraries tell a request."""
    return {"x-request-id": request_id, "request-id": request_id}


class AnswerStreams(Protocol):
    """Source of streamed answers."""

    def stream(self, begun: ActiveCall) -> AsyncGenerator[ChoiceDelta | ChoiceResult, None]:
        """Yield what each choice gains, and each complete choice."""
        ...


async def events(
    dialect: Dialect, completions: AnswerStreams, begun: ActiveCall, meter: Counters
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. What fails in the middle is an error event, the last one."""
    writer = dialect.writer(begun)
    try:
        if opening := writer.begin():
            yield opening
        async with aclosing(completions.stream(begun)) as gains:
            async for gain in gains:
                if said := writer.end(gain) if isinstance(gain, ChoiceResult) else writer.gain(gain):
                    yield said
                begun.ended += isinstance(gain, ChoiceResult)
    except Exception as error:
        begun.failed = begun.closing = True
        refusal = to_refusal(error)
        meter.errors += 1
        log.warning("stream_failed", status=refusal.status, error=str(error), exc_info=refusal.status == 500)
        yield writer.fail(refusal)
    else:
        begun.closing = True
        yield writer.close()


def data(value: Json) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named(value: Json) -> bytes:
    """An event named as its `type`."""
    return f"event: {value['type']}\n".encode() + data(value)


def answer_id(begun: ActiveCall) -> str:
    """The call id where there is one, so that an agent can name the call it credits."""
    request = begun.request
    return request.call_id(0) if request.num_choices == 1 else request.request_id


def top_logprobs(begun: ActiveCall, logprobs: Sequence[Logprob]) -> list[Logprob]:
    """With as many alternatives as were asked for."""
    top = begun.request.chat.get("top_logprobs") or 0
    return [msgspec.structs.replace(entry, top_logprobs=entry.top_logprobs[:top]) for entry in logprobs]


def flag(body: Json, name: str) -> bool:
    """A field that is true, false or absent. Raises RefusedError."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name} must be true or false", param=name)
    return bool(value)


def count(body: Json, name: str, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
    """A field that is a whole number in these bounds, or absent. Raises RefusedError."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise RefusedError(f"{name} must be a whole number from {low} to {high}, not {_short(value)}", param=name)
    return value


def _short(value: Any) -> str:
    return f"{value!r:.100}"


def options(body: Json, name: str) -> Json:
    """A field that is an object or absent. Raises RefusedError."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RefusedError(f"{name} must be an object", param=name)
    return value or {}


def objects(value: Any, param: str) -> list[Json]:
    """A list of objects. Raises RefusedError."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RefusedError(f"{param} must be a list of objects", param=param)
    return value


def served_tools(tools: Sequence[Json]) -> tuple[list[Json], tuple[str, ...]]:
    """The tools without those that a provider would run, and the types of the latter."""
    theirs = [SERVER_TOOLS.match(str(tool.get("type"))) for tool in tools]
    left_out = dict.fromkeys(match[0] for match in theirs if match)
    return [tool for tool, match in zip(tools, theirs, strict=True) if not match], tuple(left_out)


def listed(body: Json, name: str) -> list[Json]:
    """A field that is a list of objects or absent. Raises RefusedError."""
    value = body.get(name)
    return [] if value is None else objects(value, name)


def string(value: Json, name: str, where: str) -> str:
    """A field that must be text. Raises RefusedError."""
    text = value.get(name)
    if not isinstance(text, str):
        raise RefusedError(f"{where}.{name} must be text", param=where)
    return text


def flat(parts: list[Json]) -> str | list[Json]:
    """The parts of a chat message; text where they are only text, which every template understands."""
    return "\n".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def not_served(body: Json, *names: str, why: str) -> None:
    """Raise RefusedError when the body asks for one of these."""
    for name in names:
        if body.get(name):
            raise RefusedError(f"{name} is not served: {why}", code="unsupported_parameter", param=name)


def policy_of(model: str, policies: Sequence[str], aliases: Mapping[str, Sequence[str]]) -> str | None:
    """By its name, else by an alias; None for a model that is neither."""
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
