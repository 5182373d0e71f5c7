"""The control routes and their authorization: operator tokens with the roles rollout, read and admin."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container
from typing import Annotated, Any, cast

import msgspec
from litestar import Request, get, post, route
from litestar.connection import ASGIConnection
from litestar.datastructures import ResponseHeader
from litestar.exceptions import ClientException, SerializationException, ValidationException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Operation, RequestBody
from litestar.params import Body, Parameter
from litestar.response import Response
from msgspec import Meta

from swarmq import keys
from swarmq.broker.client_rules import NAME_SEPARATOR
from swarmq.proxy.engines.pool import EngineView
from swarmq.proxy.engines.pools import EnginePools
from swarmq.proxy.episodes.cache import EpisodeCache, OpenEpisodeView
from swarmq.proxy.http.episode_control import (
    AbortRequest,
    BeginRequest,
    BegunEpisode,
    EndRequest,
    EndResponse,
    EpisodeControl,
)
from swarmq.proxy.http_errors import RefusedError, to_refusal

PATH = "/v1/control"
SECURITY = "operatorToken"
OPERATOR = "swarmq_operator"
BY_CLIENT = "swarmq_by_client"

NO_END, NO_WORDS = EndRequest(), AbortRequest()
"""The requests that empty bodies stand for."""

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], None]
EpisodeId = Annotated[str, Parameter(pattern=r"^[0-9A-Za-z._:-]{1,64}$")]


class Fault(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class FaultBody(msgspec.Struct):
    """The form of every error, as in OpenAI's API."""

    error: Fault


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine of a policy. The learner on its host must reach it as well, to push weights."""

    policy: str
    url: Annotated[str, Meta(pattern=r"^[a-z]+://[^\s]{1,200}$")]


class ProxyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of this proxy alone."""

    run: str
    source: str
    policies: dict[str, list[EngineView]]
    """Policy -> its engines."""
    open_calls: int
    waiting_calls: int
    episodes: int
    """Number of episodes that the proxy remembers."""
    counts: dict[str, Any]


FAULTS = {
    400: ResponseSpec(FaultBody, description="The request is wrong; the message names the field."),
    401: ResponseSpec(FaultBody, description="No token, or one that is forged, expired or of another run."),
    403: ResponseSpec(FaultBody, description="The token lacks the role, or the episode is another client's."),
    503: ResponseSpec(FaultBody, description="Not confirmed in time; send it again after `Retry-After` seconds."),
}
CONFLICT = ResponseSpec(FaultBody, description="The episode has begun or ended otherwise; nothing was sent.")
NO_TICKET = ResponseSpec(FaultBody, description="No ticket in time; ask again with the same episode id.")
UNKNOWN = ResponseSpec(FaultBody, description="This proxy does not know the episode.")


class BodyMayLack(Operation):
    """OpenAPI operation whose empty body means `{}`."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        if isinstance(self.request_body, RequestBody):
            self.request_body.required = False


class Authority:
    """Authorization of operator tokens for one run."""

    def __init__(
        self, root: bytes, run: str, now: Callable[[], float] = time.time, removed: Container[str] = ()
    ) -> None:
        self._root = root
        self._run = run
        self._now = now
        self._removed = removed

    def needs(self, role: keys.Role) -> Guard:
        """Return a guard for a role, which stores the operator in the request's state."""

        def guard(connection: Connection, _: BaseRouteHandler) -> None:
            scheme, _space, token = connection.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not token:
                raise RefusedError(
                    "no operator token: send `Authorization: Bearer <token>`; `swarmq token` makes one",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
            operator = keys.verify_operator(
                self._root, token.strip(), run=self._run, now=self._now(), removed=self._removed
            )
            if not operator.may(role):
                raise RefusedError(
                    f"operator {operator.name!r} has the roles {', '.join(operator.roles)}; this needs {role}",
                    status=403, code="role_missing",
                )  # fmt: skip
            connection.state[OPERATOR] = operator.name
            connection.state[BY_CLIENT] = operator.by_client

        return guard


def control_routes(
    control: EpisodeControl,
    authority: Authority,
    episodes: EpisodeCache,
    fleet: EnginePools,
    status: Callable[[], ProxyStatus],
) -> list[HTTPRouteHandler]:
    """Return the router of everything below `PATH`."""
    common: dict[str, Any] = {
        "exception_handlers": {ValidationException: _refuse_invalid, ClientException: _refuse_malformed},
        "security": [{SECURITY: []}],
        "tags": ["control"],
    }

    @get(PATH + "/status", guards=[authority.needs("read")], responses=FAULTS, operation_id="status", **common)
    async def show_status() -> ProxyStatus:
        """Show the state of this proxy and its engines."""
        return status()

    @get(PATH + "/episodes", guards=[authority.needs("read")], responses=FAULTS, operation_id="listEpisodes", **common)
    async def list_episodes(limit: Annotated[int, Parameter(ge=1, le=10_000)] = 100) -> list[OpenEpisodeView]:
        """List the episodes that this proxy remembers, the most recently used first."""
        return episodes.views(limit)

    @get(
        PATH + "/episodes/{episode_id:str}",
        guards=[authority.needs("read")],
        responses={**FAULTS, 404: UNKNOWN},
        operation_id="showEpisode",
        **common,
    )
    async def show_episode(episode_id: EpisodeId) -> OpenEpisodeView:
        """Show one episode."""
        if view := episodes.view(episode_id):
            return view
        raise RefusedError(
            f"this proxy has answered no call of episode {episode_id!r}", status=404, code="episode_unknown"
        )

    @route(PATH + "/episodes", http_method="OPTIONS", include_in_schema=False, status_code=204)
    async def allow() -> Response[None]:
        """Answer OPTIONS for a path's methods; Litestar's own answer would only know the first handler."""
        return Response(None, status_code=204, headers={"allow": "GET, OPTIONS, POST"})

    @post(
        PATH + "/episodes",
        guards=[authority.needs("rollout")],
        responses={**FAULTS, 409: CONFLICT, 429: NO_TICKET},
        response_headers=[ResponseHeader(name="retry-after", description="Seconds.", documentation_only=True)],
        operation_id="beginEpisode",
        **common,
    )
    async def begin(data: Annotated[BeginRequest, Body()], request: Request[Any, Any, Any]) -> BegunEpisode:
        """Begin an episode; answered when the broker has confirmed it. Repeatable with an `episode_id`."""
        _check_name(request, data.client_id)
        base_url = str(request.base_url).rstrip("/") + "/v1"
        by_client = bool(request.state[BY_CLIENT])
        return await control.begin(data, operator=_operator(request), by_client=by_client, base_url=base_url)

    @post(
        PATH + "/episodes/{episode_id:str}/end",
        guards=[authority.needs("rollout")],
        status_code=200,
        responses={**FAULTS, 409: CONFLICT},
        operation_id="endEpisode",
        **common,
    )
    async def end(
        episode_id: EpisodeId, request: Request[Any, Any, Any], data: Annotated[EndRequest, Body()] = NO_END
    ) -> EndResponse:
        """End an episode with its reward; answered when the broker has confirmed it. Repeatable."""
        return await control.end(episode_id, data, client_id=_client_id(request))

    @post(
        PATH + "/episodes/{episode_id:str}/abort",
        guards=[authority.needs("rollout")],
        status_code=200,
        responses={**FAULTS, 409: CONFLICT},
        operation_id="abortEpisode",
        operation_class=BodyMayLack,
        **common,
    )
    async def abort(
        episode_id: EpisodeId, request: Request[Any, Any, Any], data: Annotated[AbortRequest, Body()] = NO_WORDS
    ) -> EndResponse:
        """Abort an episode: it is never trained and never counts as a reward of 0. Repeatable."""
        return await control.abort(episode_id, data, client_id=_client_id(request))

    @post(
        PATH + "/engines/add",
        guards=[authority.needs("admin")],
        status_code=200,
        responses=FAULTS,
        operation_id="addEngine",
        **common,
    )
    async def add_engine(data: Annotated[EngineRequest, Body()]) -> dict[str, list[EngineView]]:
        """Add an engine of a policy, at every proxy that shares this run folder."""
        await fleet.change(data.policy, add=data.url)
        return fleet.views()

    @post(
        PATH + "/engines/remove",
        guards=[authority.needs("admin")],
        status_code=200,
        responses=FAULTS,
        operation_id="removeEngine",
        **common,
    )
    async def remove_engine(data: Annotated[EngineRequest, Body()]) -> dict[str, list[EngineView]]:
        """Drain an engine: it gets no new calls, finishes its open ones, and is then forgotten."""
        await fleet.change(data.policy, remove=data.url)
        return fleet.views()

    return [show_status, allow, list_episodes, show_episode, begin, end, abort, add_engine, remove_engine]


def _operator(request: Request[Any, Any, Any]) -> str:
    return cast("str", request.state[OPERATOR])


def _client_id(request: Request[Any, Any, Any]) -> str:
    """Return the client that an end belongs to; an operator's is marked as such."""
    return _operator(request) if request.state[BY_CLIENT] else NAME_SEPARATOR + _operator(request)


def _check_name(request: Request[Any, Any, Any], client_id: str | None) -> None:
    """Raise RefusedError if a client's token names another client."""
    operator = _operator(request)
    if request.state[BY_CLIENT] and client_id and client_id.partition(NAME_SEPARATOR)[0] != operator:
        raise RefusedError(
            f"client_id {client_id!r}: the token is that of client {operator!r}", status=403, code="role_missing"
        )


def _refuse_invalid(request: Request[Any, Any, Any], error: ValidationException) -> Response[Any]:
    """Answer an invalid body with the wrong field and what is wrong with it."""
    flaws = error.extra if isinstance(error.extra, list) else []
    told = [_field_and_flaw(str(flaw.get("key") or "body"), str(flaw.get("message")), request) for flaw in flaws]
    words = "; ".join(f"{field}: {flaw}" for field, flaw in told) or error.detail
    refusal = to_refusal(RefusedError(words, param=told[0][0] if told else None))
    return Response(refusal.body, status_code=refusal.status)


def _refuse_malformed(_request: Request[Any, Any, Any], error: ClientException) -> Response[Any]:
    """Answer a body that is not JSON like the other routes."""
    malformed = isinstance(error.__cause__, SerializationException)
    refusal = to_refusal(
        RefusedError(f"the body is not JSON: {error.detail}", code="invalid_json") if malformed else error
    )
    return Response(refusal.body, status_code=refusal.status)


def _field_and_flaw(key: str, flaw: str, request: Request[Any, Any, Any]) -> tuple[str, str]:
    """Return field and fault of a validation error; Litestar calls the body `data` and gives no details if it is missing."""
    if key != "data":
        return key, flaw
    body = request.route_handler.parsed_fn_signature.parameters["data"].annotation
    if flaw == "'data'":
        flaw = _flaw_of_nothing(body)
    if named := re.fullmatch(r"Object (missing required|contains unknown) field `(.+)`", flaw):
        there = ", ".join(one.encode_name for one in msgspec.structs.fields(body))
        return named[2], "needed" if named[1].startswith("missing") else f"unknown; there are {there}"
    return "body", flaw


def _flaw_of_nothing(body: type) -> str:
    """Return what is wrong with an empty body, which counts as `{}`."""
    try:
        msgspec.convert({}, body)
    except msgspec.ValidationError as error:
        return str(error)
    return "missing"
