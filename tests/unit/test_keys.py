"""An api key says exactly what its client signed, to anyone who holds the root."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq import keys
from swarmq.errors import KeyRefusedError

ROOT = bytes(range(32))
CLAIMS = keys.Claims(run="r", client="alice", episode_id="e1", policies=("main",), expires_at=1000.0)
KEY = keys.mint(keys.derive_client_secret(ROOT, "alice"), CLAIMS)


def test_a_genuine_key_gives_its_claims_back():
    assert keys.verify(ROOT, KEY, run="r", now=999.0) == CLAIMS


@given(st.integers(0, len(KEY) - 1), st.characters(codec="ascii", categories=("Lu", "Ll", "Nd")))
def test_changing_any_character_is_noticed(at, char):
    changed = KEY[:at] + char + KEY[at + 1 :]
    try:
        claims = keys.verify(ROOT, changed, run="r", now=999.0)
    except KeyRefusedError:
        return
    assert claims == CLAIMS  # the same character, or unused bits of the last base64 one


def test_another_clients_secret_cannot_sign_as_alice():
    forged = keys.mint(keys.derive_client_secret(ROOT, "bob"), CLAIMS)
    with pytest.raises(KeyRefusedError, match="signature"):
        keys.verify(ROOT, forged, run="r", now=999.0)


@pytest.mark.parametrize(
    ("key", "run", "now", "reason"),
    [
        ("", "r", 0.0, "malformed"),
        ("sk-something", "r", 0.0, "malformed"),
        ("sq1.%%%.abc", "r", 0.0, "malformed"),
        (KEY, "other", 0.0, "for run 'r'"),
        (
            KEY,
            "r",
            1000.0 + keys.CLOCK_LEEWAY_S + 1,
            r"expired at 1970-01-01 00:16:40 UTC; this proxy's clock says 1970-01-01 00:17:41 UTC",
        ),
    ],
)
def test_a_key_that_is_not_good_here_is_refused_with_the_reason(key, run, now, reason):
    with pytest.raises(KeyRefusedError, match=reason) as refusal:
        keys.verify(ROOT, key, run=run, now=now)
    assert not key or key not in str(refusal.value)


def test_a_client_whose_clock_is_a_little_off_is_not_locked_out():
    assert keys.verify(ROOT, KEY, run="r", now=1000.0 + keys.CLOCK_LEEWAY_S - 1) == CLAIMS


def test_an_invite_is_one_line_and_comes_back_whole():
    invite = keys.Invite(
        run="r",
        client="alice",
        secret=keys.derive_client_secret(ROOT, "alice"),
        amqp_url="amqp://u:p@h/",
        base_url="http://h:1/v1",
        policies=("main",),
        kinds=("math",),
        group_size=4,
    )
    line = invite.encode()
    assert "\n" not in line
    assert keys.Invite.decode(f"  {line}\n") == invite
    with pytest.raises(KeyRefusedError, match="damaged"):
        keys.Invite.decode(line[:-9])
    with pytest.raises(KeyRefusedError, match="not an invite"):
        keys.Invite.decode("hello")


def test_the_root_secret_is_made_once_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "run" / "secret"
    root = keys.load_root(path)
    assert keys.load_root(path) == root
    assert len(root) == 32
    assert path.stat().st_mode & 0o077 == 0


def operator(*roles, **how):
    return keys.Operator(**{"run": "r", "name": "ops", "roles": roles, "expires_at": 1000.0, **how})


def test_a_genuine_operator_token_gives_its_roles():
    made = operator("read", "rollout")
    token = keys.mint_operator(keys.derive_operator_secret(ROOT, "ops"), made)
    assert keys.verify_operator(ROOT, token, run="r", now=999.0) == made
    assert [made.may(role) for role in ("read", "rollout", "admin")] == [True, True, False]
    assert operator("admin").may("read")


def test_a_client_may_roll_out_and_nothing_else():
    secret = keys.derive_client_secret(ROOT, "alice")
    made = operator("rollout", name="alice", by_client=True)
    assert keys.verify_operator(ROOT, keys.mint_operator(secret, made), run="r", now=0.0) == made
    for roles, by_client in ((("admin",), True), (("rollout", "read"), True), (("rollout",), False)):
        forged = keys.mint_operator(secret, operator(*roles, name="alice", by_client=by_client))
        with pytest.raises(KeyRefusedError):
            keys.verify_operator(ROOT, forged, run="r", now=0.0)


def test_a_key_is_no_token_and_a_token_is_no_key():
    with pytest.raises(KeyRefusedError):
        keys.verify_operator(ROOT, KEY, run="r", now=0.0)
    secret = keys.derive_client_secret(ROOT, "alice")
    token = keys.mint_operator(secret, operator("rollout", name="alice", by_client=True))
    with pytest.raises(KeyRefusedError):
        keys.verify(ROOT, token, run="r", now=0.0)


@pytest.mark.parametrize(("how", "reason"), [({"run": "other"}, "for run"), ({"expires_at": float("nan")}, "expired")])
def test_a_token_that_is_not_good_here_is_refused_with_the_reason(how, reason):
    token = keys.mint_operator(keys.derive_operator_secret(ROOT, "ops"), operator("read", **how))
    with pytest.raises(KeyRefusedError, match=reason):
        keys.verify_operator(ROOT, token, run="r", now=0.0)


def test_an_episode_always_gets_the_same_of_several_proxies_and_all_are_used():
    urls = tuple(f"http://h:{port}/v1" for port in range(3))
    invite = keys.Invite(
        run="r",
        client="c",
        secret=b"",
        amqp_url="",
        base_url=urls[0],
        policies=(),
        kinds=(),
        group_size=1,
        base_urls=urls,
    )
    chosen = [invite.base_url_of(f"episode-{n}") for n in range(60)]
    assert chosen == [invite.base_url_of(f"episode-{n}") for n in range(60)]
    assert set(chosen) == set(urls)
