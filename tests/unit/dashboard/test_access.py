"""Tokens that open a dashboard."""

import pytest

from swarmq import keys
from swarmq.dashboard.access import ForbiddenError, LinkAccess, OperatorAccess
from swarmq.errors import KeyRefusedError

ROOT = b"r" * 32


def token(*roles, name="ann", run="r", expires_at=200.0):
    operator = keys.Operator(run=run, name=name, roles=roles, expires_at=expires_at)
    return keys.mint_operator(keys.derive_operator_secret(ROOT, name), operator)


def access(**how):
    return OperatorAccess(ROOT, "r", now=lambda: 100.0, **how)


@pytest.mark.parametrize(
    ("roles", "operates"), [(("read",), False), (("operate",), True), (("admin",), True), (("rollout", "read"), False)]
)
def test_an_operator_reads_and_operates_by_role(roles, operates):
    found = access().identify(token(*roles))
    assert (found.name, found.roles, found.can_operate) == ("ann", roles, operates)


def test_a_token_without_the_role_read_is_forbidden():
    with pytest.raises(ForbiddenError, match="needs read"):
        access().identify(token("rollout"))


@pytest.mark.parametrize("text", ["", "nonsense", token("read", run="other"), token("read", expires_at=1.0)])
def test_other_tokens_are_refused(text):
    with pytest.raises(KeyRefusedError):
        access().identify(text)


def test_revoked_tokens_are_refused():
    with pytest.raises(KeyRefusedError, match="revoked"):
        access(revoked={keys.operator_entry("ann")}).identify(token("read"))


def test_the_link_s_token_alone_opens_a_dashboard():
    link = LinkAccess("sesame", name="bob", cookie="c")
    assert link.identify("sesame").can_operate
    for other in ("", "Sesame", "sésame", "sesame "):
        with pytest.raises(KeyRefusedError):
            link.identify(other)
