"""The control routes: episodes that operators begin and end, the state of the proxy, and its engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, cast

import msgspec
from litestar import Request, get, post, route
from litestar.datastructures import ResponseHeader
from litestar.exceptions import ClientException, SerializationException, ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Operation, RequestBody
from litestar.params import Body, Parameter
from litestar.response import Response
from msgspec import Meta

from swarmq.broker.client_rules import NAME_SEPARATOR
from swarmq.keys import Role
from swarmq.proxy.engines.pool import EngineView
from swarmq.proxy.engines.pools import EnginePools
from swarmq.proxy.episodes.cache import EpisodeCache, OpenEpisodeView
from swarmq.proxy.http.authorization import BY_CLIENT, OPERATOR, OPERATOR_SCHEME, Authority
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
EPISODES = PATH + "/episodes"
EPISODE_BY_ID = EPISODES + "/{episode_id:str}"

NO_END, NO_REASON = EndRequest(), AbortRequest()
"""Meaning of an empty body: a request with the default of every field."""

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
    """An engine of a policy. The learner must be able to reach it, to push weights."""

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


class OptionalBody(Operation):
    """OpenAPI operation whose empty body means `{}`."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        if isinstance(self.request_body, RequestBody):
            self.request_body.required = False


class ControlRoutes:
    """Handlers of everything below `PATH`."""

    def __init__(
        self,
        control: EpisodeControl,
        authority: Authority,
        episodes: EpisodeCache,
        fleet: EnginePools,
        status: Callable[[], ProxyStatus],
    ) -> None:
        self._control = control
        self._authority = authority
        self._episodes = episodes
        self._fleet = fleet
        self._status = status

    def handlers(self) -> list[HTTPRouteHandler]:
        """Return the route handlers for the application."""
        common: dict[str, Any] = {
            "exception_handlers": {ValidationException: refuse_invalid, ClientException: refuse_malformed},
            "tags": ["control"],
        }
        roles: tuple[Role, ...] = ("read", "rollout", "admin")
        read, rollout, admin = (
            {**common, "guards": [self._authority.require(role)], "security": [{OPERATOR_SCHEME: [role]}]}
            for role in roles
        )
        known = {**FAULTS, 404: UNKNOWN}
        begun = {**FAULTS, 409: CONFLICT, 429: NO_TICKET}
        ended = {**FAULTS, 409: CONFLICT}
        retry_after = ResponseHeader(name="retry-after", description="Seconds.", documentation_only=True)
        return [
            get(PATH + "/status", operation_id="status", responses=FAULTS, **read)(self.show_status),
            route(EPISODES, http_method="OPTIONS", include_in_schema=False, status_code=204)(self.allow),
            get(EPISODES, operation_id="listEpisodes", responses=FAULTS, **read)(self.list_episodes),
            get(EPISODE_BY_ID, operation_id="showEpisode", responses=known, **read)(self.show_episode),
            post(EPISODES, operation_id="beginEpisode", responses=begun, response_headers=[retry_after], **rollout)(
                self.begin
            ),
            post(EPISODE_BY_ID + "/end", operation_id="endEpisode", responses=ended, status_code=200, **rollout)(
                self.end
            ),
            post(
                EPISODE_BY_ID + "/abort",
                operation_id="abortEpisode",
                operation_class=OptionalBody,
                responses=ended,
                status_code=200,
                **rollout,
            )(self.abort),
            post(PATH + "/engines/add", operation_id="addEngine", responses=FAULTS, status_code=200, **admin)(
                self.add_engine
            ),
            post(PATH + "/engines/remove", operation_id="removeEngine", responses=FAULTS, status_code=200, **admin)(
                self.remove_engine
            ),
        ]

    async def show_status(self) -> ProxyStatus:
        """Show the state of this proxy and its engines."""
        return self._status()

    async def list_episodes(self, limit: Annotated[int, Parameter(ge=1, le=10_000)] = 100) -> list[OpenEpisodeView]:
        """List the episodes that this proxy remembers, the most recently used first."""
        return self._episodes.views(limit)

    async def show_episode(self, episode_id: EpisodeId) -> OpenEpisodeView:
        """Show one episode."""
        if view := self._episodes.view(episode_id):
            return view
        raise RefusedError(
            f"this proxy has answered no call of episode {episode_id!r}", status=404, code="episode_unknown"
        )

    async def allow(self) -> Response[None]:
        """Answer OPTIONS for a path's methods; Litestar's own answer would only know the first handler."""
        return Response(None, status_code=204, headers={"allow": "GET, OPTIONS, POST"})

    async def begin(self, data: Annotated[BeginRequest, Body()], request: Request[Any, Any, Any]) -> BegunEpisode:
        """Begin an episode; the answer comes when the broker has confirmed the begin. Repeatable with an `episode_id`."""
        _check_name(request, data.client_id)
        base_url = str(request.base_url).rstrip("/") + "/v1"
        by_client = bool(request.state[BY_CLIENT])
        return await self._control.begin(data, operator=_operator(request), by_client=by_client, base_url=base_url)

    async def end(
        self, episode_id: EpisodeId, request: Request[Any, Any, Any], data: Annotated[EndRequest, Body()] = NO_END
    ) -> EndResponse:
        """End an episode with its reward; the answer comes when the broker has confirmed the end. Repeatable."""
        return await self._control.end(episode_id, data, client_id=_client_id(request))

    async def abort(
        self, episode_id: EpisodeId, request: Request[Any, Any, Any], data: Annotated[AbortRequest, Body()] = NO_REASON
    ) -> EndResponse:
        """Abort an episode: it is never trained and never counts as a reward of 0. Repeatable."""
        return await self._control.abort(episode_id, data, client_id=_client_id(request))

    async def add_engine(self, data: Annotated[EngineRequest, Body()]) -> dict[str, list[EngineView]]:
        """Add an engine of a policy, at every proxy that shares this run folder."""
        await self._fleet.change(data.policy, add=data.url)
        return self._fleet.views()

    async def remove_engine(self, data: Annotated[EngineRequest, Body()]) -> dict[str, list[EngineView]]:
        """Drain an engine: it gets no new calls, finishes its open ones, and is then forgotten."""
        await self._fleet.change(data.policy, remove=data.url)
        return self._fleet.views()


def _operator(request: Request[Any, Any, Any]) -> str:
    return cast("str", request.state[OPERATOR])


def _client_id(request: Request[Any, Any, Any]) -> str:
    """Return the client that an end belongs to: the client of the token, or the operator's name with a prefix that no client
    has."""
    return _operator(request) if request.state[BY_CLIENT] else NAME_SEPARATOR + _operator(request)


def _check_name(request: Request[Any, Any, Any], client_id: str | None) -> None:
    """Raise RefusedError if a client's token names another client."""
    operator = _operator(request)
    if request.state[BY_CLIENT] and client_id and client_id.partition(NAME_SEPARATOR)[0] != operator:
        raise RefusedError(
            f"client_id is {client_id!r}, but the token belongs to client {operator!r}: send its name, or none",
            status=403,
            code="role_missing",
        )


def refuse_invalid(request: Request[Any, Any, Any], error: ValidationException) -> Response[Any]:
    """Answer an invalid body with the name of each invalid field and what is wrong with it."""
    flaws = error.extra if isinstance(error.extra, list) else []
    described = [_field_and_flaw(str(flaw.get("key") or "body"), str(flaw.get("message")), request) for flaw in flaws]
    words = "; ".join(f"{field}: {flaw}" for field, flaw in described) or error.detail
    refusal = to_refusal(RefusedError(words, param=described[0][0] if described else None))
    return Response(refusal.body, status_code=refusal.status)


def refuse_malformed(_request: Request[Any, Any, Any], error: ClientException) -> Response[Any]:
    """Answer a body that is not JSON in the form of the other errors."""
    malformed = isinstance(error.__cause__, SerializationException)
    refusal = to_refusal(
        RefusedError(f"the body is not JSON: {error.detail}", code="invalid_json") if malformed else error
    )
    return Response(refusal.body, status_code=refusal.status)


def _field_and_flaw(key: str, flaw: str, request: Request[Any, Any, Any]) -> tuple[str, str]:
    """Return the name of an invalid field and what is wrong with it; Litestar calls the body `data` and gives
    no details if it is missing."""
    if key != "data":
        return key, flaw
    body = request.route_handler.parsed_fn_signature.parameters["data"].annotation
    if flaw == "'data'":
        flaw = _describe_missing_body(body)
    if named := re.fullmatch(r"Object (missing required|contains unknown) field `(.+)`", flaw):
        there = ", ".join(one.encode_name for one in msgspec.structs.fields(body))
        return named[2], "needed" if named[1].startswith("missing") else f"unknown; there are {there}"
    return "body", flaw


def _describe_missing_body(body: type) -> str:
    """Return what is wrong with a missing body, which counts as `{}`."""
    try:
        msgspec.convert({}, body)
    except msgspec.ValidationError as error:
        return str(error)
    return "missing"
