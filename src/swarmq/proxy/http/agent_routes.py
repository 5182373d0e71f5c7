"""The agents' routes: one for each dialect, counting of tokens, the list of models, and clear errors for everything else.

agent ──POST──> key ──> body ──> read_request ──> Completions.begin ──┬─> whole ──> JSON
                                                                      └─> stream ──> server-sent events
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar, cast

from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody
from litestar.params import FromPath
from litestar.response import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from swarmq.keys import Claims
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.completions.answer_receipts import AnswerReceipts
from swarmq.proxy.completions.pipeline import Completions
from swarmq.proxy.counters import Counters
from swarmq.proxy.dialects import (
    DIALECTS,
    CountTokens,
    Dialect,
    anthropic_messages,
    chat_completions,
    openapi_schemas,
    read_request,
    response_headers,
    stream_events,
)
from swarmq.proxy.dialects.base import policy_of
from swarmq.proxy.engines.pool import EnginePool
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http_errors import RefusedError
from swarmq.proxy.requests import RequestContext

Json = dict[str, Any]
T = TypeVar("T")

MODELS = "/v1/models"
PATTERN = frozenset("*?[")
"""Characters of alias patterns, which cannot be listed as model names."""
AGENT_KEY = "agentKey"
"""Name of the episode keys' security scheme in the OpenAPI document."""
STATUSES = {
    400: "The request is wrong, or the model cannot do it; the message names the field.",
    401: "No key, or one that is forged, expired or of another run.",
    403: "The episode has used up its calls or tokens.",
    404: "The model is not one of the key's policies.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The proxy has as many calls as it takes; again after `Retry-After` seconds.",
    504: "The answer took longer than calls may.",
    503: "The engine or the broker is away; again after `Retry-After` seconds.",
}


class GoneError(Exception):
    """The agent has disconnected."""


def agent_routes(
    completions: Completions,
    *,
    claims_of: Callable[[Request[Any, Any, Any]], Claims],
    pools: Mapping[str, EnginePool],
    aliases: Mapping[str, Sequence[str]],
    episodes: EpisodeCache,
    meter: Counters,
    serving: AnswerReceipts,
    body_timeout_s: float,
    remote_images: bool,
    refuses_tools: bool,
    refuses_unknown: bool,
) -> list[HTTPRouteHandler]:
    """Return the routes. `claims_of` reads a request's key, or raises RefusedError."""

    async def body_of(request: Request[Any, Any, Any]) -> bytes:
        try:
            async with asyncio.timeout(body_timeout_s):
                return await request.body()
        except TimeoutError as error:
            raise RefusedError(
                f"the body did not arrive within {body_timeout_s:g} s", status=408, code="request_timeout"
            ) from error

    async def read_call(request: Request[Any, Any, Any], dialect: Dialect) -> RequestContext:
        claims = claims_of(request)
        with episodes.arriving(claims) as memory:
            raw = await body_of(request)
            call = read_request(
                dialect,
                raw,
                claims,
                request.headers,
                memory.conversations,
                aliases=aliases,
                remote_images=remote_images,
                refuses_tools=refuses_tools,
                refuses_unknown=refuses_unknown,
            )
        meter.leave_out(call.left_out)
        if call.policy not in pools:
            raise _no_model(call.policy, [name for name in claims.policies if name in pools])
        return call

    async def answer(request: Request[Any, Any, Any], dialect: Dialect) -> ASGIApp:
        call = await read_call(request, dialect)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            begun = await completions.begin(call)
            try:
                with serving.answering(begun, scope):
                    if call.stream:
                        await _send_events(
                            send, begun, stream_events(dialect, completions, begun, meter), response_headers(begun)
                        )
                    else:
                        body = dialect.answer(begun, await completions.whole(begun))
                        await _whole(request, body, response_headers(begun))(scope, receive, send)
            finally:
                await begun.close()  # where the agent was gone before the first event

        return watched(respond)

    def watched(respond: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]) -> ASGIApp:
        """Count a response as open, and cancel it when the agent disconnects."""

        async def respond_unless_gone(scope: Scope, receive: Receive, send: Send) -> None:
            meter.open_calls += 1
            try:
                with suppress(GoneError):  # who could be told?
                    await cancel_if_gone(receive, respond(scope, receive, send))
            finally:
                meter.open_calls -= 1

        return respond_unless_gone

    def route(dialect: Dialect) -> HTTPRouteHandler:
        @post(
            dialect.path, status_code=200, name=dialect.path, operation_class=_operation(dialect.summary, dialect.body)
        )
        async def ask(request: Request[Any, Any, Any]) -> ASGIApp:
            return await answer(request, dialect)

        return ask

    counting = CountTokens()

    @post(counting.path, status_code=200, operation_class=_operation(counting.summary, counting.body))
    async def count_tokens(request: Request[Any, Any, Any]) -> ASGIApp:
        call = await read_call(request, counting)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await _whole(request, {"input_tokens": await completions.count(call)}, {})(scope, receive, send)

        return watched(respond)

    def served(request: Request[Any, Any, Any]) -> list[str]:
        return [name for name in claims_of(request).policies if name in pools]

    @get(MODELS, operation_class=_operation("The policies that the key may call, under all of their names"))
    async def models(request: Request[Any, Any, Any]) -> Json:
        policies = served(request)
        others = (alias for policy in policies for alias in aliases.get(policy, ()) if not PATTERN & set(alias))
        names = list(dict.fromkeys([*policies, *others]))
        if anthropic_messages.ANTHROPIC in request.headers:
            return anthropic_messages.model_cards(names)
        return {"object": "list", "data": [chat_completions.model_card(name) for name in names]}

    @get(MODELS + "/{model:path}", operation_class=_operation("One of them"))
    async def model(request: Request[Any, Any, Any], model: FromPath[str]) -> Json:
        name = model.removeprefix("/")  # the names of others' models have slashes
        if policy_of(name, policies := served(request), aliases) is None:
            raise _no_model(name, policies)
        return (
            anthropic_messages.model_card(name)
            if anthropic_messages.ANTHROPIC in request.headers
            else chat_completions.model_card(name)
        )

    return [*map(route, DIALECTS), count_tokens, models, model]


def not_served(method: str, path: str) -> RefusedError:
    served = ", ".join([*(dialect.path for dialect in DIALECTS), CountTokens.path, MODELS])
    return RefusedError(
        f"{method} {path:.200} is not served: a policy answers at {served}", status=404, code="unknown_url"
    )


def read_key(request: Request[Any, Any, Any]) -> str:
    """Return the API key from the header that OpenAI's or Anthropic's library uses. Raises RefusedError if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    if key := request.headers.get("x-api-key", ""):
        return key.strip()
    raise RefusedError(
        "no api key: send `Authorization: Bearer <key>` or `x-api-key: <key>`, the key that `begin_episode()` returned",
        status=401, code="invalid_api_key",
    )  # fmt: skip


def _whole(request: Request[Any, Any, Any], body: Json, told: Mapping[str, str]) -> ASGIApp:
    return Response(body, headers=told).to_asgi_response(app=None, request=request)


async def cancel_if_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the agent disconnects first; GoneError is then raised."""
    outcome: list[T] = []
    failure: list[Exception] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel()

    async def run() -> None:
        try:
            outcome.append(await work)
        except Exception as error:
            failure.append(error)  # as itself, not in a group
        finally:
            watcher.cancel()

    async with asyncio.TaskGroup() as tasks:
        watcher = tasks.create_task(watch())
        worker = tasks.create_task(run())
    work.close()  # cancelled before it began
    if failure:
        raise failure[0]
    if not outcome:
        raise GoneError
    return outcome[0]


async def _send_events(
    send: Send, begun: ActiveCall, said: AsyncGenerator[bytes, None], told: Mapping[str, str]
) -> None:
    """Send the answer as server-sent events with the headers `told`. The last event ends the body at once, because agents may
    disconnect after it."""
    named = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        **told,
    }
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    async with aclosing(said):
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        async for event in said:
            await send({"type": "http.response.body", "body": event, "more_body": not begun.closing})


def _no_model(name: str, served: Iterable[str]) -> RefusedError:
    there = ", ".join(served) or "none"
    return RefusedError(
        f"model {name!r:.200} is not a policy of this run that the key may call: {there}",
        status=404, code="model_not_found", param="model",
    )  # fmt: skip


def _operation(told: str, body: Json | None = None) -> type[Operation]:
    """Return the OpenAPI operation of a route. Bodies are read by the routes, because errors have the dialect's form."""

    class Documented(Operation):
        def __init__(self, **facts: Any) -> None:
            super().__init__(**facts)
            self.summary = told
            self.security = [{AGENT_KEY: []}]
            answered = {"application/json": _media({"type": "object"})}
            if body is not None:
                self.request_body = RequestBody(required=True, content={"application/json": _media(body)})
                answered["text/event-stream"] = _media({"description": "Server-sent events."})
            refused = {"application/json": _media(openapi_schemas.ERROR)}
            self.responses = {
                "200": OpenAPIResponse(description="The answer; events when it is streamed.", content=answered),
                **{str(status): OpenAPIResponse(description=why, content=refused) for status, why in STATUSES.items()},
            }

    return Documented


def _media(schema: Json) -> OpenAPIMediaType:
    return OpenAPIMediaType(schema=cast("Any", schema))
