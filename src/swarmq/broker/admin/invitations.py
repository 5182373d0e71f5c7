"""`swarmq invite`, `swarmq client add | list | remove`: who may take part in a run, from the side of who runs it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from swarmq import keys
from swarmq.broker.admin.users import MAX_CHANNELS, MAX_CONNECTIONS, ManagementApi
from swarmq.broker.error_mapping import redact_url
from swarmq.config import RunFolder, SwarmJob, make_folder, resolve_amqp_url
from swarmq.errors import ConfigError
from swarmq.keys import Invite
from swarmq.registries.clients import ClientRegistry, InvitedClient, read_clients
from swarmq.runtime.files import write_atomically

HOST_CLIENT = "local"
"""Name of the client whose invite lies in the run folder."""


class ClientAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """How a client gets to the run, where that is not how its own host does."""

    amqp: str | None = None
    """`amqps://host:port/vhost`, without user and password."""
    proxy: str | None = None
    """`https://host:port/v1`."""
    ca: Path | None = None
    """PEM certificate of the authority behind both, if machines do not know it."""
    http: bool = False
    """Through the proxy alone: no RabbitMQ user."""


def make_host_invite(job: SwarmJob, base_urls: tuple[str, ...], *, amqp: str | None = None) -> Invite:
    """The host's own, with an operator's rights on the broker. `job` is resolved; `base_urls` are its proxies'."""
    assert job.broker.url
    return Invite(
        run=job.run,
        client=HOST_CLIENT,
        secret=keys.derive_client_secret(keys.load_root(job.run_folder.root_secret), HOST_CLIENT),
        amqp_url=amqp or job.broker.url,
        base_url=base_urls[0],
        base_urls=base_urls,
        ca=keys.read_certificate(Path(job.proxy.certificate)) if job.proxy.certificate else b"",
        policies=tuple(job.policies),
        kinds=job.task_kinds,
        group_size=job.groups.group_size,
        frozen=job.frozen,
        group_sizes={kind: job.group_size(kind) for kind in job.kinds},
    )


def invite_host(job: SwarmJob, *, amqp: str | None = None, proxy: str | None = None) -> Invite:
    """For a run whose parts were started one by one: what `swarmq up` would write into its folder, so that every command
    finds broker and settings, and its invite. `amqp` and `proxy` are the addresses for clients, where they have others
    than we. Raises ConfigError, BrokerError; then nothing is written."""
    folder, url = job.run_folder, resolve_amqp_url(job.broker)
    if folder.endpoints.exists():
        raise ConfigError(f"{folder.path}: this run was started by `swarmq up`, whose invite is in {folder.invite}")
    if url is None:
        raise ConfigError("broker.url: say which RabbitMQ the parts of this run use, there or in $SWARMQ_AMQP_URL")
    if proxy is None and not job.proxy.port:
        raise ConfigError("--proxy: say where clients find the proxy, or set proxy.port and proxy.host to where it is")
    redact_url(url)  # which says what is wrong with it
    _check_url("--amqp", amqp or "", ("amqp", "amqps"))
    _check_url("--proxy", proxy or "", ("http", "https"))
    make_folder(folder.path)
    resolved = msgspec.structs.replace(
        job, folder=str(Path(job.folder).resolve()), broker=msgspec.structs.replace(job.broker, url=url)
    )
    ports = range(job.proxy.port, job.proxy.port + job.proxy.count)
    invite = make_host_invite(resolved, (proxy,) if proxy else tuple(map(job.proxy.url, ports)), amqp=amqp)
    if proxy:
        invite = msgspec.structs.replace(invite, base_urls=())
    write_atomically(folder.resolved, resolved.to_toml().encode())
    write_atomically(folder.invite, invite.encode().encode() + b"\n")
    return invite


def add_client(
    folder: RunFolder,
    host: Invite,
    name: str,
    management: ManagementApi,
    reach: ClientAddresses,
    *,
    max_connections: int = MAX_CONNECTIONS,
    max_channels: int = MAX_CHANNELS,
) -> Invite:
    """The invite of a new client. `host` is that of the run itself. Raises ConfigError, BrokerError; nothing half-done."""
    ca = keys.read_certificate(reach.ca) if reach.ca else host.ca
    amqp_url = "" if reach.http else reach.amqp or host.amqp_url
    _check_url("--amqp", amqp_url, ("amqp", "amqps"))
    _check_url("--proxy", reach.proxy or host.base_url, ("http", "https"))
    with ClientRegistry.open(folder.clients) as members:
        members.check_new(name)
        password = secrets.token_urlsafe(24)
        user = ""
        if not reach.http:
            user = management.add_client(
                host.run, name, password, max_connections=max_connections, max_channels=max_channels
            )
        members.put(InvitedClient(name=name, added_at=time.time(), broker_user=user))
    return msgspec.structs.replace(
        host,
        client=name,
        secret=keys.derive_client_secret(keys.load_root(folder.root_secret), name),
        amqp_url=amqp_url and _with_login(amqp_url, user, password),
        base_url=reach.proxy or host.base_url,
        base_urls=() if reach.proxy else host.base_urls,
        invited=not reach.http,
        ca=ca,
    )


def remove_client(folder: RunFolder, name: str, management: ManagementApi) -> None:
    """From now on its keys are refused and its connections closed; what it ended before stays. Raises ConfigError."""
    with ClientRegistry.open(folder.clients) as members:
        member = members.entries.get(name)
        if member is None:
            raise ConfigError(f"no client {name!r}: this run has invited {', '.join(members.entries) or 'nobody'}")
        members.remove(name, now=time.time())  # the keys first: they need nobody's help
        if member.broker_user:
            management.remove(member.broker_user)


def renew_clients(folder: RunFolder, management: ManagementApi) -> None:
    """Give clients that were invited by an older version the rights of this one. Raises BrokerError."""
    for member in read_clients(folder.clients).values():
        if member.broker_user and member.removed_at is None:
            management.grant(member.broker_user)


def _check_url(what: str, url: str, schemes: tuple[str, ...]) -> None:
    if url and (urlsplit(url).scheme not in schemes or not urlsplit(url).hostname):
        raise ConfigError(f"{what} {url!r}: give {' or '.join(f'{scheme}://' for scheme in schemes)} and a host")


def _with_login(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    where = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user)}:{quote(password)}@{where}", path=parts.path or "/"))
