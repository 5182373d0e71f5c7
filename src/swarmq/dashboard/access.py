"""Access to the dashboard (by the token of a link or, behind a proxy, by operator tokens), and the rules that browsers must
enforce.

A browser posts its token once and gets it back as a cookie that scripts cannot read and other sites cannot send; programs
send `Authorization: Bearer`. Both are checked at each request, so that a revoked token ends at once.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Container
from typing import Protocol

import msgspec

from swarmq import keys
from swarmq.errors import KeyRefusedError, SwarmqError

HEADERS = {
    "content-security-policy": "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer."""


class ForbiddenError(SwarmqError):
    """The reader's token does not permit the request."""


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a token, who may look at runs."""

    name: str
    roles: tuple[str, ...]
    can_operate: bool


class Access(Protocol):
    """Check of the tokens that open a dashboard."""

    @property
    def cookie(self) -> str:
        """Name of the cookie, so that two dashboards of one host do not end each other's sessions."""

    def identify(self, token: str) -> Reader:
        """Return the token's holder. Raises KeyRefusedError, or ForbiddenError for a token without the role `read`."""


class LinkAccess:
    """One random token, in the link that `swarmq dashboard` prints. Its holder has the rights of the user who started it."""

    def __init__(self, token: str, *, name: str, cookie: str) -> None:
        self._token, self._name, self._cookie = token, name, cookie

    @property
    def cookie(self) -> str:
        return self._cookie

    def identify(self, token: str) -> Reader:
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise KeyRefusedError(
                "the token is not that of this dashboard: open the link that `swarmq dashboard` printed"
            )
        return Reader(name=self._name, roles=("read", "operate"), can_operate=True)


class OperatorAccess:
    """Operator tokens of one run (`swarmq token`)."""

    def __init__(
        self, root: bytes, run: str, *, revoked: Container[str] = (), now: Callable[[], float] = time.time
    ) -> None:
        self._root, self._run, self._revoked, self._now = root, run, revoked, now

    @property
    def cookie(self) -> str:
        return f"swarmq_{self._run}"

    def identify(self, token: str) -> Reader:
        operator = keys.verify_operator(self._root, token, run=self._run, now=self._now(), removed=self._revoked)
        if not operator.may("read"):
            raise ForbiddenError(
                f"operator {operator.name!r} has the roles {', '.join(operator.roles)}; the dashboard needs read"
            )
        return Reader(name=operator.name, roles=operator.roles, can_operate=operator.may("operate"))
