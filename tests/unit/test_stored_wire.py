"""Records, invites and keys of swarmq 0.1.0 are still understood."""

from typing import Any

import msgspec
import pytest

from support.stored import stored_wire
from swarmq.keys import Invite, verify
from swarmq.messages import decode, encode, idempotency_key

ROOT = b"r" * 32


@pytest.mark.parametrize("name", sorted(stored_wire()["records"]))
def test_a_stored_record_keeps_every_value_and_its_key(name):
    stored = stored_wire()["records"][name]
    body = bytes.fromhex(stored["hex"])
    message = decode(body)
    assert idempotency_key(message) == stored["key"]
    before, now = msgspec.msgpack.decode(body), msgspec.msgpack.decode(encode(message))
    assert _lost(before, now) == []


def test_a_stored_invite_and_api_key_are_still_good():
    stored = stored_wire()
    invite = Invite.decode(stored["invite"])
    assert (invite.run, invite.client, invite.base_urls[1]) == ("faults", "alice", "http://127.0.0.1:8001/v1")
    claims = verify(ROOT, stored["api_key"], run="faults", now=2e9)
    assert (claims.episode_id, claims.policies, claims.max_calls) == ("e1", ("main",), 9)


def _lost(before: Any, now: Any, path: str = "") -> list[str]:
    """Paths at which `now` has not what `before` had; what `now` has besides does not count."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [lost for key in before for lost in _lost(before[key], now.get(key), f"{path}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(now) >= len(before):
        return [lost for n, one in enumerate(before) for lost in _lost(one, now[n], f"{path}[{n}]")]
    return [] if before == now else [path]
