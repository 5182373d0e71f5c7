"""The agents' routes: one for each dialect, counting of tokens, the list of models, and clear errors for everything else.

agent ──POST──> key ──> body ──> read_request ──> Completions.begin ──┬─> whole ──> JSON
                                                                      └─> stream ──> server-sent events
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar, cast

import structlog
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody
from litestar.params import FromPath
from litestar.response import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from swarmq.config import ProxySettings
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.completions.answer_receipts import AnswerReceipts, take_has_left
from swarmq.proxy.completions.pipeline import Completions
from swarmq.proxy.counters import Counters
from swarmq.proxy.dialects import (
    DIALECTS,
    MESSAGES,
    CountTokens,
    Dialect,
    Writer,
    anthropic_messages,
    chat_completions,
    openapi_schemas,
    read_request,
    response_headers,
)
from swarmq.proxy.dialects.base import policy_of
from swarmq.proxy.engines.pool import EnginePool
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http.authorization import AGENT_SCHEME, Authority
from swarmq.proxy.http_errors import RefusedError, to_refusal
from swarmq.proxy.requests import ChoiceResult, RequestContext

Json = dict[str, Any]
T = TypeVar("T")
log = structlog.get_logger()

MODELS = "/v1/models"
AGAIN = "/v1"
"""Before the paths of Anthropic's clients, which add `/v1/messages` to a base URL that ends in `/v1` already."""
PATTERN = frozenset("*?[")
"""Characters of alias patterns, which cannot be listed as model names."""
STATUSES = {
    400: "The request is wrong, or the model cannot do it; the message names the field.",
    401: "No key, or one that is forged, expired or of another run.",
    403: "The episode has used up its calls or tokens.",
    404: "The model is not one of the key's policies.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The proxy has as many calls as it takes; retry after `Retry-After` seconds.",
    504: "The answer took longer than calls may.",
    503: "The engine or the broker does not answer; retry after `Retry-After` seconds.",
}


class GoneError(Exception):
    """The agent has disconnected."""


class AgentRoutes:
    """Handlers of the agents' requests."""

    def __init__(
        self,
        completions: Completions,
        settings: ProxySettings,
        *,
        authority: Authority,
        pools: Mapping[str, EnginePool],
        aliases: Mapping[str, Sequence[str]],
        episodes: EpisodeCache,
        meter: Counters,
        receipts: AnswerReceipts,
    ) -> None:
        self._completions = completions
        self._settings = settings
        self._authority = authority
        self._pools = pools
        self._aliases = aliases
        self._episodes = episodes
        self._meter = meter
        self._receipts = receipts

    def handlers(self) -> list[HTTPRouteHandler]:
        """Return the route handlers for the application."""
        counting = _operation(CountTokens.summary, CountTokens.body)
        listing = _operation("The policies that the key may call, under all of their names")
        one = _operation("A policy that the key may call")
        return [
            *map(self._dialect_handler, DIALECTS),
            post(CountTokens.path, status_code=200, operation_class=counting)(self.count_tokens),
            get(MODELS, operation_class=listing)(self.models),
            get(MODELS + "/{model:path}", operation_class=one)(self.model),
            post(AGAIN + MESSAGES.path, status_code=200, include_in_schema=False)(self.messages),
            post(AGAIN + CountTokens.path, status_code=200, include_in_schema=False)(self.count_tokens),
            get(AGAIN + MODELS, include_in_schema=False)(self.models),
            get(AGAIN + MODELS + "/{model:path}", include_in_schema=False)(self.model),
        ]

    def _dialect_handler(self, dialect: Dialect) -> HTTPRouteHandler:
        @post(
            dialect.path, status_code=200, name=dialect.path, operation_class=_operation(dialect.summary, dialect.body)
        )
        async def ask(request: Request[Any, Any, Any]) -> ASGIApp:
            return await self._answer(request, dialect)

        return ask

    async def messages(self, request: Request[Any, Any, Any]) -> ASGIApp:
        return await self._answer(request, MESSAGES)

    async def count_tokens(self, request: Request[Any, Any, Any]) -> ASGIApp:
        take_has_left(cast("dict[str, Any]", request.scope))  # for its cycle; a count has no delivery report
        call = await self._read_call(request, CountTokens())

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            body = {"input_tokens": await self._completions.count(call)}
            await _answer_whole(request, body, {})(scope, receive, send)

        return self._watch(respond)

    async def models(self, request: Request[Any, Any, Any]) -> Json:
        policies = self._served_policies(request)
        others = (alias for policy in policies for alias in self._aliases.get(policy, ()) if not PATTERN & set(alias))
        names = list(dict.fromkeys([*policies, *others]))
        if anthropic_messages.ANTHROPIC in request.headers:
            return anthropic_messages.model_cards(names)
        return {"object": "list", "data": [chat_completions.model_card(name) for name in names]}

    async def model(self, request: Request[Any, Any, Any], model: FromPath[str]) -> Json:
        name = model.removeprefix("/")  # model names of other providers have slashes
        if policy_of(name, policies := self._served_policies(request), self._aliases) is None:
            raise _no_model(name, policies)
        return (
            anthropic_messages.model_card(name)
            if anthropic_messages.ANTHROPIC in request.headers
            else chat_completions.model_card(name)
        )

    async def _answer(self, request: Request[Any, Any, Any], dialect: Dialect) -> ASGIApp:
        has_left = take_has_left(cast("dict[str, Any]", request.scope))
        call = await self._read_call(request, dialect)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            begun = await self._completions.begin(call)
            try:
                with self._receipts.answering(begun, has_left):
                    if call.stream:
                        await self._send_events(send, begun, dialect.writer(begun))
                    else:
                        body = dialect.answer(begun, await self._completions.whole(begun))
                        await _answer_whole(request, body, response_headers(begun))(scope, receive, send)
            finally:
                await begun.close()  # if the agent disconnected before the first event

        return self._watch(respond)

    async def _send_events(self, send: Send, begun: ActiveCall, writer: Writer) -> None:
        """Send the answer as server-sent events; an error in the middle is the last event. The last event ends the body at once,
        because agents may disconnect after it."""
        named = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **response_headers(begun),
        }
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        try:
            if opening := writer.begin():
                await send({"type": "http.response.body", "body": opening, "more_body": True})
            async with aclosing(self._completions.stream(begun)) as gains:
                async for gain in gains:
                    if part := writer.end(gain) if isinstance(gain, ChoiceResult) else writer.gain(gain):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    begun.ended += isinstance(gain, ChoiceResult)
        except Exception as error:
            begun.failed = True
            refusal = to_refusal(error)
            self._meter.errors += 1
            log.warning("stream_failed", status=refusal.status, reason=str(error), exc_info=refusal.status == 500)
            last = writer.fail(refusal)
        else:
            last = writer.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _read_call(self, request: Request[Any, Any, Any], dialect: Dialect) -> RequestContext:
        claims = self._authority.verify_agent(request)
        with self._episodes.arriving(claims) as memory:
            call = read_request(
                dialect,
                await self._read_body(request),
                claims,
                request.headers,
                memory.conversations,
                aliases=self._aliases,
                remote_images=self._settings.remote_images,
                refuses_tools=self._settings.server_tools == "refuse",
                refuses_unknown=self._settings.unknown_parameters == "refuse",
            )
        self._meter.leave_out(call.left_out)
        if call.policy not in self._pools:
            raise _no_model(call.policy, [name for name in claims.policies if name in self._pools])
        return call

    async def _read_body(self, request: Request[Any, Any, Any]) -> bytes:
        timeout_s = self._settings.receive_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await request.body()
        except TimeoutError as error:
            raise RefusedError(
                f"the body did not arrive within {timeout_s:g} s", status=408, code="request_timeout"
            ) from error

    def _served_policies(self, request: Request[Any, Any, Any]) -> list[str]:
        """Return the key's policies that have an engine pool."""
        return [name for name in self._authority.verify_agent(request).policies if name in self._pools]

    def _watch(self, respond: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]) -> ASGIApp:
        """Return a response that counts as an open call and is cancelled when the agent disconnects."""

        async def respond_unless_gone(scope: Scope, receive: Receive, send: Send) -> None:
            self._meter.open_calls += 1
            try:
                with suppress(GoneError):  # nobody is left to receive an error
                    await cancel_if_gone(receive, respond(scope, receive, send))
            finally:
                self._meter.open_calls -= 1

        return respond_unless_gone


def make_unknown_url_error(method: str, path: str) -> RefusedError:
    served = ", ".join([*(dialect.path for dialect in DIALECTS), CountTokens.path, MODELS])
    return RefusedError(
        f"{method} {path:.200} is not served: a policy answers at {served}", status=404, code="unknown_url"
    )


def _answer_whole(request: Request[Any, Any, Any], body: Json, headers: Mapping[str, str]) -> ASGIApp:
    return Response(body, headers=headers).to_asgi_response(app=None, request=request)


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
            failure.append(error)  # raised below without an ExceptionGroup around it
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


def _no_model(name: str, served: Iterable[str]) -> RefusedError:
    there = ", ".join(served) or "none"
    return RefusedError(
        f"model {name!r:.200} is not a policy of this run that the key may call: {there}",
        status=404, code="model_not_found", param="model",
    )  # fmt: skip


def _operation(summary: str, body: Json | None = None) -> type[Operation]:
    """Return the OpenAPI operation of a route. `body`: JSON schema of a request; routes read their bodies themselves, so that errors
    have the dialect's form."""

    class Documented(Operation):
        def __init__(self, **facts: Any) -> None:
            super().__init__(**facts)
            self.summary = summary
            self.security = [{AGENT_SCHEME: []}]
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
