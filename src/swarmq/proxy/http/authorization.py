"""Authorization of requests: agents by the API key of their episode, operators by tokens with the roles rollout, read and admin."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from swarmq import keys
from swarmq.proxy.http_errors import RefusedError

AGENT_SCHEME = "agentKey"
"""Name of the API keys' security scheme in the OpenAPI document."""
OPERATOR_SCHEME = "operatorToken"
"""Name of the operator tokens' security scheme in the OpenAPI document."""
EPISODE = "swarmq_episode"
"""Key of an agent's episode id in the request's state."""
OPERATOR = "swarmq_operator"
"""Key of the operator's name in the request's state."""
BY_CLIENT = "swarmq_by_client"
"""Key of `Operator.by_client` in the request's state."""

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], None]


class Authority:
    """Verification of API keys and operator tokens for one run."""

    def __init__(
        self, root: bytes, run: str, *, now: Callable[[], float] = time.time, revoked: Container[str] = ()
    ) -> None:
        self._root = root
        self._run = run
        self._now = now
        self._revoked = revoked

    def verify_agent(self, request: Request[Any, Any, Any]) -> keys.Claims:
        """Return the claims of the request's API key and store its episode in the request's state.

        Raises RefusedError, KeyRefusedError.
        """
        claims = keys.verify(self._root, _read_key(request), run=self._run, now=self._now(), removed=self._revoked)
        request.state[EPISODE] = claims.episode_id
        return claims

    def require(self, role: keys.Role) -> Guard:
        """Return a guard that demands a token with the role and stores the operator in the request's state."""

        def guard(connection: Connection, _: BaseRouteHandler) -> None:
            if not (token := read_bearer(connection)):
                raise RefusedError(
                    "no operator token: send `Authorization: Bearer <token>`; `swarmq token` makes one",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
            operator = keys.verify_operator(self._root, token, run=self._run, now=self._now(), removed=self._revoked)
            check_role(operator, role)
            connection.state[OPERATOR] = operator.name
            connection.state[BY_CLIENT] = operator.by_client

        return guard


def read_bearer(connection: Connection) -> str:
    """Return the token of the authorization header, or ""."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def check_role(operator: keys.Operator, role: keys.Role) -> None:
    """Raise RefusedError if the operator may not act in this role."""
    if not operator.may(role):
        raise RefusedError(
            f"operator {operator.name!r} has the roles {', '.join(operator.roles)}; this needs {role}",
            status=403, code="role_missing",
        )  # fmt: skip


def _read_key(request: Request[Any, Any, Any]) -> str:
    """Return the API key from the header that OpenAI's or Anthropic's library uses. Raises RefusedError if there is none."""
    if key := read_bearer(request) or request.headers.get("x-api-key", "").strip():
        return key
    raise RefusedError(
        "no api key: send `Authorization: Bearer <key>` or `x-api-key: <key>`, with the episode's own key, `ep.api_key`",
        status=401, code="invalid_api_key",
    )  # fmt: skip
