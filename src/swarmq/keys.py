"""API keys that clients mint and proxies verify offline, operator tokens, and invites of clients and hosts.

One root secret per run gives every client its own secret, HMAC(root, client name), with which the client signs keys:

    root ──HMAC(name)──> client secret ──HMAC(claims)──> sq1.<claims>.<mac>

A leaked client secret is revoked by the client's name, and a proxy needs only the root secret.

Operator tokens (sqt1.<operator>.<mac>) open the control routes in the same way. The holder of the root signs them with any
roles. A client signs them with its own secret, and only with the role `rollout`.
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
from swarmq.runtime.amqp_urls import map_nodes
from swarmq.runtime.files import locked_for_change, write_atomically

PREFIX = "sq1"
OPERATOR_PREFIX = "sqt1"
INVITE_PREFIX = "swarmq-invite"
HOST_INVITE_PREFIX = "swarmq-host"
OPERATOR_MEMBER = "operator."
"""Prefix of operators' names among the entries of the client registry."""
ROOT_BYTES = 32
CLOCK_LEEWAY_S = 60.0
"""Seconds by which a client's clock may be behind the proxy's before its fresh keys count as expired."""


_PEM = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----")


class Claims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Permissions of an API key: model calls to `policies` within one episode until `expires_at` (Unix seconds)."""

    run: str
    client: str
    episode_id: str
    policies: tuple[str, ...]
    kind: str = ""
    mode: Mode = "train"
    expires_at: float
    max_calls: int = 0
    """Maximum number of model calls in the episode; 0: no limit."""
    max_tokens: int = 0
    """Maximum number of sampled tokens in the whole episode; 0: no limit."""
    agent: str | None = None
    """Agent tag of requests without the header `x-swarmq-agent`."""
    made_at: float = 0.0
    """Unix time of minting by the client's clock, for error messages; 0 if unknown."""


Role = Literal["rollout", "read", "operate", "admin"]
"""`rollout` begins and ends episodes; `read` sees status, episodes, metrics and the dashboard; `operate` reads, and acts on the run
from the dashboard; `admin` may do all of these and manage engines."""


class Operator(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Permissions of an operator token: roles on the control routes of a run until `expires_at` (Unix seconds)."""

    run: str
    name: str
    roles: tuple[Role, ...]
    expires_at: float
    by_client: bool = False
    """Whether the token is signed with the secret of the client `name`."""

    def may(self, role: Role) -> bool:
        return role in self.roles or "admin" in self.roles or (role == "read" and "operate" in self.roles)


Sealed = TypeVar("Sealed", Claims, Operator)
AnyInvite = TypeVar("AnyInvite", "Invite", "HostInvite")


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a client needs to join a run, encoded as one line of text."""

    run: str
    client: str
    secret: bytes
    amqp_url: str
    base_url: str
    """Base URL of the first proxy, ending in `/v1`."""
    policies: tuple[str, ...]
    kinds: tuple[str, ...]
    group_size: int
    ticketed: bool = True
    base_urls: tuple[str, ...] = ()
    """Base URLs of all proxies when the invite was made, as the run's host reaches them; empty: only `base_url`."""
    frozen: tuple[str, ...] = ()
    """Policies that are served and never trained, and therefore need no reward."""
    group_sizes: dict[str, int] = {}
    """Kind -> group size, for kinds that differ from `group_size`."""
    invited: bool = False
    """Whether the client has a RabbitMQ user of its own, `<run>.<client>`, with a client's rights alone."""
    ca: bytes = b""
    """DER certificate of the authority behind the broker's and proxy's certificates; empty: the machine's own authorities."""

    @property
    def over_http(self) -> bool:
        """Whether the client cannot reach RabbitMQ and begins and ends episodes through the proxy."""
        return not self.amqp_url

    @property
    def broker_url(self) -> str:
        """`amqp_url` with the certificate authority as a query parameter, as the driver expects it."""
        return _with_authority(self.amqp_url, self.ca)

    def base_url_of(self, episode_id: str, *, now: tuple[str, ...] = ()) -> str:
        """Return the base URL of the episode's proxy, always the same one, because that proxy holds the episode's conversation.

        `now`: the run's present proxies, if they have changed since the invite was made.
        """
        return self.base_urls_of(episode_id, now=now)[0]

    def base_urls_of(self, episode_id: str, *, now: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the base URL of the episode's proxy, followed by its fallbacks in order."""
        urls = (now if self.base_urls else ()) or self.base_urls or (self.base_url,)
        home = home_proxy_index(episode_id, len(urls))
        return urls[home:] + urls[:home]

    def encode(self) -> str:
        """Return the invite as one line of text, which `decode` reads."""
        return f"{INVITE_PREFIX}.{_b64(msgspec.msgpack.encode(self))}"

    @classmethod
    def decode(cls, text: str) -> Invite:
        """Return the invite in `text`. Raises KeyRefusedError if there is none."""
        return _decode_invite(text, cls, INVITE_PREFIX, command="swarmq client add NAME")


class HostInvite(msgspec.Struct, frozen=True, kw_only=True):
    """What another host needs to run engines and proxies of a run, encoded as one line of text.

    It contains the root secret, which signs every key and token of the run, so an invite is as powerful as the run folder. The
    invite of a study's worker contains no secret but the password of its RabbitMQ user.
    """

    run: str
    host: str
    user: str
    """The host's own RabbitMQ user, in `amqp_url`."""
    amqp_url: str
    root: bytes
    engine_secret: str
    expires_at: float
    """Unix time until which engines and proxies may join with the invite; those that have joined stay."""
    ca: bytes = b""
    """DER certificate of the authority that signed the broker's certificate; empty: the host's own authorities."""

    @property
    def broker_url(self) -> str:
        """`amqp_url` with the certificate authority as a query parameter, as the driver expects it."""
        return _with_authority(self.amqp_url, self.ca)

    def encode(self) -> str:
        """Return the invite as one line of text, which `decode` reads."""
        return f"{HOST_INVITE_PREFIX}.{_b64(msgspec.msgpack.encode(self))}"

    @classmethod
    def decode(cls, text: str) -> HostInvite:
        """Return the host invite in `text`. Raises KeyRefusedError if `text` is none, or damaged."""
        return _decode_invite(text, cls, HOST_INVITE_PREFIX, command="swarmq host add NAME")

    def check_current(self, now: float) -> None:
        """Raise KeyRefusedError if the invite has expired at `now`, in Unix seconds."""
        if not self.expires_at + CLOCK_LEEWAY_S >= now:
            raise KeyRefusedError(
                f"the invite of host {self.host!r} for run {self.run!r} expired at {_clock(self.expires_at)}, and this host's clock says "
                f"{_clock(now)}: set the clock if it is wrong, else `swarmq host add` makes another invite under another name"
            )


def _with_authority(amqp_url: str, ca: bytes) -> str:
    if not ca:
        return amqp_url
    authority = f"cadata={quote(base64.b64encode(ca), safe='')}"
    return map_nodes(amqp_url, lambda url: f"{url}{'&' if '?' in url else '?'}{authority}")


def _decode_invite(text: str, kind: type[AnyInvite], prefix: str, *, command: str) -> AnyInvite:
    head, _, body = text.strip().partition(".")
    if head != prefix:
        raise KeyRefusedError(f"not an invite: it starts with `{prefix}.`; `{command}` prints one")
    try:
        return msgspec.msgpack.decode(_unb64(body), type=kind)
    except (msgspec.MsgspecError, KeyRefusedError) as error:
        raise KeyRefusedError(f"the invite is damaged ({error}): copy the whole line again") from error


def home_proxy_index(episode_id: str, num_proxies: int) -> int:
    """Return the index of the proxy that serves an episode."""
    return zlib.crc32(episode_id.encode()) % num_proxies


def read_certificate(path: Path) -> bytes:
    """Return the first certificate of a PEM file as DER. Raises ConfigError if there is none."""
    try:
        text = path.read_text()
        begin, end = text.index(_PEM[0]), text.index(_PEM[1])
        return ssl.PEM_cert_to_DER_cert(text[begin : end + len(_PEM[1])])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a certificate in PEM form: {error}") from error


def generate_root() -> bytes:
    return secrets.token_bytes(ROOT_BYTES)


def load_root(path: Path) -> bytes:
    """Return the run's root secret, creating it on first use, readable by its owner alone.

    Raises ConfigError if the file is damaged: with an empty secret, anybody could sign keys.
    """
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
    """Return the task with its seal, which covers everything but the attempt number, so that a client that returns the task can
    change nothing else."""
    facts = (task.run, task.slot, task.kind, task.group_size, task.mode, bytes(task.payload))
    seal = hmac.digest(secret, msgspec.msgpack.encode(facts), hashlib.sha256)
    return msgspec.structs.replace(task, seal=seal)


def is_sealed(secret: bytes, task: Task) -> bool:
    return hmac.compare_digest(seal_task(secret, task).seal, task.seal)


def derive_engine_secret(root: bytes) -> str:
    """Return the secret that the run's engines require of every caller."""
    return hmac.digest(root, b"engines", hashlib.sha256).hex()


def operator_entry(name: str) -> str:
    """Return the registry entry under which an operator's tokens are revoked; no client can have this name."""
    return f"{OPERATOR_MEMBER}{name}"


def is_operator_entry(name: str) -> bool:
    """Return whether a registry entry stands for an operator's revoked tokens and not for a client."""
    return name.startswith(OPERATOR_MEMBER)


def mint(secret: bytes, claims: Claims) -> str:
    """Sign an API key for one episode with the client's secret."""
    return _seal(PREFIX, claims, secret)


def mint_operator(secret: bytes, operator: Operator) -> str:
    """Sign an operator token with the operator's secret, or with the client's if `operator.by_client`."""
    return _seal(OPERATOR_PREFIX, operator, secret)


def verify(root: bytes, key: str, *, run: str, now: float, removed: Container[str] = ()) -> Claims:
    """Return the claims of a genuine, unexpired key of this run.

    `removed`: names of clients whose keys are revoked. Raises KeyRefusedError, whose text never contains the key.
    """
    what = "api key"
    hint = "use the episode's own, `ep.api_key`"
    claims = _unseal(key, PREFIX, Claims, lambda made: derive_client_secret(root, made.client), what=what, hint=hint)
    _check_current(claims, what, "its episode is over; begin a new one", run=run, now=now)
    _check_member(claims.client, removed)
    return claims


def verify_operator(
    root: bytes, token: str, *, run: str, now: float, removed: Container[str] = (), command: str = "swarmq token"
) -> Operator:
    """Return the operator of a genuine, unexpired token of this run. `command`: makes such tokens, for messages.

    Raises KeyRefusedError, whose text never contains the token.
    """

    def secret(operator: Operator) -> bytes:
        derive = derive_client_secret if operator.by_client else derive_operator_secret
        return derive(root, operator.name)

    what = "operator token"
    operator = _unseal(token, OPERATOR_PREFIX, Operator, secret, what=what, hint=f"`{command}` makes one")
    _check_current(operator, what, f"make a new one with `{command}`", run=run, now=now)
    if operator.by_client and operator.roles != ("rollout",):
        raise KeyRefusedError("the operator token is signed by a client: its only role may be rollout")
    if operator.by_client:
        _check_member(operator.name, removed)
    elif operator_entry(operator.name) in removed:
        raise KeyRefusedError(
            f"the tokens of operator {operator.name!r} were revoked: `{command}` makes one under another name"
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
        raise KeyRefusedError(f"the {what} is for run {record.run!r}, not for {run!r}")
    if not record.expires_at + CLOCK_LEEWAY_S >= now:
        raise KeyRefusedError(f"the {what} has expired{_describe_clocks(record, now)}: {hint}")


def _describe_clocks(record: Claims | Operator, now: float) -> str:
    """Return the expiry and clock times for the message about an expired key or token, because a fresh key looks expired if
    the clock of its client is behind."""
    if not math.isfinite(record.expires_at):
        return ""
    made_at = record.made_at if isinstance(record, Claims) else 0.0
    minted = f", and the key was minted at {_clock(made_at)} by the client's clock" if made_at else ""
    return (
        f" at {_clock(record.expires_at)}; this proxy's clock says {_clock(now)}{minted} (if the client's clock is behind, set it: "
        "its fresh keys look expired)"
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
