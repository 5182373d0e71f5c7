"""Access to a host's daemon: operator tokens (`swarmq host token`), and the socket file, which its owner alone can open.

`read` sees runs, logs and files; `operate` launches, changes, stops and resumes runs and invites clients; `admin` also deletes runs and
launches jobs that run programs of their own.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Container
from typing import Any, get_args

import msgspec
from litestar import Request
from litestar.handlers import BaseRouteHandler

from swarmq import keys
from swarmq.keys import Role
from swarmq.proxy.http.authorization import Connection, Guard, check_role, read_bearer
from swarmq.proxy.http_errors import RefusedError

AUDIENCE = "@host"
"""Audience of a host's tokens, in place of the name of a run; no run can have this name."""
CALLER = "swarmq_caller"
"""Key under which a request's state holds its caller."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request."""

    name: str
    roles: frozenset[Role]
    """All roles that the caller has, also those that follow from others."""

    @property
    def is_admin(self) -> bool:
        return "admin" in self.roles


class HostAccess:
    """Finds the sender of a request and whether its role allows the request."""

    def __init__(self, root: bytes, *, revoked: Container[str] = (), now: Callable[[], float] = time.time) -> None:
        self._root, self._revoked, self._now = root, revoked, now

    def require(self, role: Role) -> Guard:
        """Return a guard that demands a token with the role, and stores the caller in the request's state."""

        def guard(connection: Connection, _: BaseRouteHandler) -> None:
            operator = self._identify(connection)
            check_role(operator, role)
            connection.state[CALLER] = Caller(
                name=operator.name, roles=frozenset(role for role in get_args(Role) if operator.may(role))
            )

        return guard

    def _identify(self, connection: Connection) -> keys.Operator:
        if token := read_bearer(connection):
            return keys.verify_operator(
                self._root,
                token,
                run=AUDIENCE,
                now=self._now(),
                removed=self._revoked,
                command="swarmq host token",
            )
        if _is_by_socket_file(connection):
            return keys.Operator(run=AUDIENCE, name=getpass.getuser(), roles=("admin",), expires_at=self._now())
        raise RefusedError(
            "no operator token: send `Authorization: Bearer <token>`; `swarmq host token` makes one",
            status=401,
            code="invalid_api_key",
        )


def get_caller(request: Request[Any, Any, Any]) -> Caller:
    caller: Caller = request.state[CALLER]
    return caller


def _is_by_socket_file(connection: Connection) -> bool:
    """Return whether the request came over the daemon's socket file, whose address has a path and no port."""
    server = connection.scope.get("server")
    return server is not None and server[1] is None
