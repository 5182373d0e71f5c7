"""Api keys that a client mints and any proxy verifies without asking anybody, and the invite a client starts from.

One root secret per run gives every client its own secret, HMAC(root, client name); a key is signed with that:

    root ──HMAC(name)──> client secret ──HMAC(claims)──> sq1.<claims>.<mac>

so a leaked client secret is revoked by its name, and a proxy needs the root alone.

Operator tokens open the control routes in the same way (sqt1.<operator>.<mac>). Whoever holds the root signs them with
any roles; a client signs with its own secret, and what it signs may only roll out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import secrets
import ssl
import time
import zlib
from collections.abc import Callable, Container
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

import msgspec

from swarmq.errors import ConfigError, KeyRefusedError
from swarmq.messages import Mode, Task
from swarmq.runtime.files import locked_for_change, write_atomically

PREFIX = "sq1"
OPERATOR_PREFIX = "sqt1"
OPERATOR_MEMBER = "operator."
"""Before an operator's name, among members."""
ROOT_BYTES = 32
CLOCK_LEEWAY_S = 60.0
"""How far a client's clock may run ahead or behind before its fresh keys count as expired."""


_PEM = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----")


class Claims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a key permits: calls of these policies within this episode until `expires_at` (Unix seconds)."""

    run: str
    client: str
    episode_id: str
    policies: tuple[str, ...]
    kind: str = ""
    mode: Mode = "train"
    expires_at: float
    max_calls: int = 0
    """0 means no limit."""
    max_tokens: int = 0
    """Sampled tokens over the whole episode; 0 means no limit."""
    agent: str | None = None
    """Who is credited with calls whose header `x-swarmq-agent` names nobody."""
    made_at: float = 0.0
    """Unix time by its maker's clock, for messages; 0 where it does not say."""


Role = Literal["rollout", "read", "admin"]
"""rollout: begin and end episodes; read: status, episodes, metrics; admin: both of these, and add and remove engines."""


class Operator(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who may use the control routes of a run until `expires_at` (Unix seconds), and what for."""

    run: str
    name: str
    roles: tuple[Role, ...]
    expires_at: float
    by_client: bool = False
    """Signed with the secret of the client `name`."""

    def may(self, role: Role) -> bool:
        return role in self.roles or "admin" in self.roles


Sealed = TypeVar("Sealed", Claims, Operator)


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a client needs to join a run, in one line to paste."""

    run: str
    client: str
    secret: bytes
    amqp_url: str
    base_url: str
    """The first proxy's, ending in `/v1`."""
    policies: tuple[str, ...]
    kinds: tuple[str, ...]
    group_size: int
    ticketed: bool = True
    base_urls: tuple[str, ...] = ()
    """Of all proxies when the invite was made, as the run's host reaches them; empty: `base_url` and no other is meant."""
    frozen: tuple[str, ...] = ()
    """Of the policies, those that are served and never trained: they need no reward."""
    group_sizes: dict[str, int] = {}
    """Kind -> its own group size, where it has one."""
    invited: bool = False
    """Has a RabbitMQ user of its own, `<run>.<client>`, with a client's rights alone."""
    ca: bytes = b""
    """Certificate (DER) of the authority that vouches for broker and proxy, where the machine's own do not."""

    @property
    def over_http(self) -> bool:
        """Whether RabbitMQ is out of reach: episodes begin and end through the proxy."""
        return not self.amqp_url

    @property
    def broker_url(self) -> str:
        """`amqp_url` with the authority in it, as the driver wants it."""
        if not self.ca:
            return self.amqp_url
        joint = "&" if "?" in self.amqp_url else "?"
        return f"{self.amqp_url}{joint}cadata={quote(base64.b64encode(self.ca), safe='')}"

    def base_url_of(self, episode_id: str, *, now: tuple[str, ...] = ()) -> str:
        """The proxy that an episode is to use: always the same one, so that it finds its conversation there.

        `now` are the run's proxies where they have changed since the invite was made.
        """
        return self.base_urls_of(episode_id, now=now)[0]

    def base_urls_of(self, episode_id: str, *, now: tuple[str, ...] = ()) -> tuple[str, ...]:
        """That one, and the others in the order in which they are to stand in for it."""
        urls = (now if self.base_urls else ()) or self.base_urls or (self.base_url,)
        home = home_proxy_index(episode_id, len(urls))
        return urls[home:] + urls[:home]

    def encode(self) -> str:
        return "swarmq-invite." + _b64(msgspec.msgpack.encode(self))

    @classmethod
    def decode(cls, text: str) -> Invite:
        """Raises KeyRefusedError when `text` is not an invite."""
        head, _, body = text.strip().partition(".")
        if head != "swarmq-invite":
            raise KeyRefusedError("not an invite: it starts with `swarmq-invite.`; `swarmq client add NAME` prints one")
        try:
            return msgspec.msgpack.decode(_unb64(body), type=cls)
        except (msgspec.MsgspecError, KeyRefusedError) as error:
            raise KeyRefusedError(f"the invite is damaged ({error}): copy the whole line again") from error


def home_proxy_index(episode_id: str, num_proxies: int) -> int:
    """Number of the proxy that an episode's client sends it to."""
    return zlib.crc32(episode_id.encode()) % num_proxies


def read_certificate(path: Path) -> bytes:
    """DER of the first certificate in a PEM file. Raises ConfigError."""
    try:
        text = path.read_text()
        begin, end = text.index(_PEM[0]), text.index(_PEM[1])
        return ssl.PEM_cert_to_DER_cert(text[begin : end + len(_PEM[1])])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a certificate in PEM form: {error}") from error


def generate_root() -> bytes:
    return secrets.token_bytes(ROOT_BYTES)


def load_root(path: Path) -> bytes:
    """The run's root secret, made on first use, readable by its owner alone. Raises ConfigError for a damaged one: with an empty
    one, anybody could sign keys."""
    if not path.exists():
        with locked_for_change(path):
            if not path.exists():  # or another process was first
                write_atomically(path, generate_root())
    if len(root := path.read_bytes()) < ROOT_BYTES:
        raise ConfigError(
            f"{path}: damaged ({len(root)} bytes, not {ROOT_BYTES}), and it cannot be made anew: every key and invite of the run is "
            "derived from it. Bring it back from a copy; or remove it and start the run again: nothing that was trained or is queued is "
            "lost, but every client needs a new invite (`swarmq client remove`, `swarmq client add` under another name)"
        )
    return root


def derive_client_secret(root: bytes, client: str) -> bytes:
    return hmac.digest(root, f"client:{client}".encode(), hashlib.sha256)


def derive_operator_secret(root: bytes, name: str) -> bytes:
    return hmac.digest(root, f"operator:{name}".encode(), hashlib.sha256)


def derive_task_secret(root: bytes) -> bytes:
    return hmac.digest(root, b"tasks", hashlib.sha256)


def seal_task(secret: bytes, task: Task) -> Task:
    """The task with its seal: whoever gives it back can count its attempts on, and change nothing else of it."""
    facts = (task.run, task.slot, task.kind, task.group_size, task.mode, bytes(task.payload))
    seal = hmac.digest(secret, msgspec.msgpack.encode(facts), hashlib.sha256)
    return msgspec.structs.replace(task, seal=seal)


def is_sealed(secret: bytes, task: Task) -> bool:
    return hmac.compare_digest(seal_task(secret, task).seal, task.seal)


def derive_engine_secret(root: bytes) -> str:
    """What the run's engines ask every caller for."""
    return hmac.digest(root, b"engines", hashlib.sha256).hex()


def operator_entry(name: str) -> str:
    """Under which the revocation of an operator's tokens is kept: no name that a client can have."""
    return f"{OPERATOR_MEMBER}{name}"


def is_operator_entry(name: str) -> bool:
    """Whether a member is no client, but tokens that were revoked."""
    return name.startswith(OPERATOR_MEMBER)


def mint(secret: bytes, claims: Claims) -> str:
    """The api key for one episode. `secret` is the client's."""
    return _seal(PREFIX, claims, secret)


def mint_operator(secret: bytes, operator: Operator) -> str:
    """An operator token. `secret` is the operator's, or the client's where it is `by_client`."""
    return _seal(OPERATOR_PREFIX, operator, secret)


def verify(root: bytes, key: str, *, run: str, now: float, removed: Container[str] = ()) -> Claims:
    """The claims of a genuine, current key of this run. Raises KeyRefusedError, which never repeats the key.

    `removed` holds the names of the clients whose keys count no more.
    """
    what = "api key"
    hint = "use the one `begin_episode()` returned"
    claims = _unseal(key, PREFIX, Claims, lambda made: derive_client_secret(root, made.client), what=what, hint=hint)
    _check_current(claims, what, "its episode is over; begin a new one", run=run, now=now)
    _check_member(claims.client, removed)
    return claims


def verify_operator(root: bytes, token: str, *, run: str, now: float, removed: Container[str] = ()) -> Operator:
    """The operator of a genuine, current token of this run. Raises KeyRefusedError, which never repeats the token."""

    def secret(made: Operator) -> bytes:
        return derive_client_secret(root, made.name) if made.by_client else derive_operator_secret(root, made.name)

    what = "operator token"
    operator = _unseal(token, OPERATOR_PREFIX, Operator, secret, what=what, hint="`swarmq token` makes one")
    _check_current(operator, what, "make a new one with `swarmq token`", run=run, now=now)
    if operator.by_client and operator.roles != ("rollout",):
        raise KeyRefusedError("the operator token is signed by a client: its only role may be rollout")
    if operator.by_client:
        _check_member(operator.name, removed)
    elif operator_entry(operator.name) in removed:
        raise KeyRefusedError(
            f"the tokens of operator {operator.name!r} were revoked: `swarmq token` makes one under another name"
        )
    return operator


def _seal(prefix: str, record: Claims | Operator, secret: bytes) -> str:
    body = _b64(msgspec.msgpack.encode(record))
    return f"{prefix}.{body}.{_b64(hmac.digest(secret, body.encode(), hashlib.sha256))}"


def _unseal(
    text: str, prefix: str, kind: type[Sealed], secret: Callable[[Sealed], bytes], *, what: str, hint: str
) -> Sealed:
    try:
        head, body, mac = text.split(".")
        record = msgspec.msgpack.decode(_unb64(body), type=kind)
        given = _unb64(mac)
    except (ValueError, msgspec.MsgspecError, RecursionError, KeyRefusedError) as error:
        raise KeyRefusedError(f"the {what} is malformed: {hint}") from error
    wanted = hmac.digest(secret(record), body.encode(), hashlib.sha256)
    if not hmac.compare_digest(given, wanted) or head != prefix:
        raise KeyRefusedError(f"the {what}'s signature is wrong: it was made for another run or changed")
    return record


def _check_current(record: Claims | Operator, what: str, hint: str, *, run: str, now: float) -> None:
    if record.run != run:
        raise KeyRefusedError(f"the {what} is for run {record.run!r}, this proxy serves {run!r}")
    if not record.expires_at + CLOCK_LEEWAY_S >= now:
        raise KeyRefusedError(f"the {what} has expired{_by_whose_clock(record, now)}: {hint}")


def _by_whose_clock(record: Claims | Operator, now: float) -> str:
    """An expired key may be a fresh one of a machine whose clock is behind: whoever reads this can tell."""
    if not math.isfinite(record.expires_at):
        return ""
    made_at = record.made_at if isinstance(record, Claims) else 0.0
    made = f", and it was made at {_clock(made_at)} by its maker's" if made_at else ""
    return (
        f" at {_clock(record.expires_at)}; by this proxy's clock it is {_clock(now)}{made} (a machine whose clock is behind makes keys "
        "that are old when they are new: set it)"
    )


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(at, 0.0), 253402300799.0)))


def _check_member(client: str, removed: Container[str]) -> None:
    if client in removed:
        raise KeyRefusedError(f"client {client!r} was removed from this run: `swarmq client add` invites another")


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as error:
        raise KeyRefusedError("not base64") from error
