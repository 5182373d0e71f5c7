"""Api keys that a client mints and any proxy verifies without asking anybody, and the invite a client starts from.

One root secret per run gives every client its own secret, HMAC(root, client name); a key is signed with that:

    root ──HMAC(name)──> client secret ──HMAC(claims)──> sq1.<claims>.<mac>

so a leaked client secret is revoked by its name, and a proxy needs the root alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from pathlib import Path

import msgspec

from swarmq.errors import KeyRefusedError
from swarmq.messages import Mode

PREFIX = "sq1"
CLOCK_LEEWAY_S = 60.0
"""How far a client's clock may run ahead or behind before its fresh keys count as expired."""


class Claims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a key permits: calls of these policies within this episode until `expires_at` (Unix seconds)."""

    run: str
    client: str
    episode_id: str
    policies: tuple[str, ...]
    mode: Mode = "train"
    expires_at: float
    max_calls: int = 0
    """0 means no limit."""
    max_tokens: int = 0
    """Sampled tokens over the whole episode; 0 means no limit."""
    agent: str | None = None


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a client needs to join a run, in one line to paste."""

    run: str
    client: str
    secret: bytes
    amqp_url: str
    base_url: str
    """The proxy's, ending in `/v1`."""
    policies: tuple[str, ...]
    kinds: tuple[str, ...]
    group_size: int
    ticketed: bool = True

    def encode(self) -> str:
        return "swarmq-invite." + _b64(msgspec.msgpack.encode(self))

    @classmethod
    def decode(cls, text: str) -> Invite:
        """Raises KeyRefusedError when `text` is not an invite."""
        head, _, body = text.strip().partition(".")
        if head != "swarmq-invite":
            raise KeyRefusedError("not an invite: it starts with `swarmq-invite.`; `swarmq up` prints one")
        try:
            return msgspec.msgpack.decode(_unb64(body), type=cls)
        except (msgspec.MsgspecError, KeyRefusedError) as error:
            raise KeyRefusedError(f"the invite is damaged ({error}): copy the whole line again") from error


def new_root() -> bytes:
    return secrets.token_bytes(32)


def load_root(path: Path) -> bytes:
    """The run's root secret, made on first use, readable by its owner alone."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        path.write_bytes(root := new_root())
        return root


def client_secret(root: bytes, client: str) -> bytes:
    return hmac.digest(root, f"client:{client}".encode(), hashlib.sha256)


def mint(secret: bytes, claims: Claims) -> str:
    """The api key for one episode."""
    body = _b64(msgspec.msgpack.encode(claims))
    return f"{PREFIX}.{body}.{_b64(hmac.digest(secret, body.encode(), hashlib.sha256))}"


def verify(root: bytes, key: str, *, run: str, now: float) -> Claims:
    """The claims of a genuine, current key of this run. Raises KeyRefusedError, which never repeats the key."""
    try:
        prefix, body, mac = key.split(".")
        claims = msgspec.msgpack.decode(_unb64(body), type=Claims)
        given = _unb64(mac)
    except (ValueError, msgspec.MsgspecError, KeyRefusedError) as error:
        raise KeyRefusedError("the api key is malformed: use the one `begin_episode()` returned") from error
    wanted = hmac.digest(client_secret(root, claims.client), body.encode(), hashlib.sha256)
    if prefix != PREFIX or not hmac.compare_digest(given, wanted):
        raise KeyRefusedError("the api key's signature is wrong: it was made for another run or changed")
    if claims.run != run:
        raise KeyRefusedError(f"the api key is for run {claims.run!r}, this proxy serves {run!r}")
    if claims.expires_at + CLOCK_LEEWAY_S < now:
        raise KeyRefusedError("the api key has expired: its episode is over; begin a new one")
    return claims


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as error:
        raise KeyRefusedError("not base64") from error
