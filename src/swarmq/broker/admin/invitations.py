"""Invites for clients of a run, created and revoked on the operator's host: `swarmq invite`, `swarmq client add | remove`."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from swarmq import keys
from swarmq.broker.admin.users import MAX_CHANNELS, MAX_CONNECTIONS, ManagementApi
from swarmq.config import RunFolder, SwarmJob, make_folder, resolve_amqp_url
from swarmq.errors import BrokerError, ConfigError
from swarmq.keys import Invite
from swarmq.registries.clients import ClientRegistry, InvitedClient, read_clients
from swarmq.registries.hosts import read_hosts
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.amqp_urls import map_nodes, split_nodes
from swarmq.runtime.files import write_atomically

HOST_CLIENT = "local"
"""Client name in the host's own invite, which is in the run folder."""


class ClientAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses by which a client reaches the run, where they differ from the host's own."""

    amqp: str | None = None
    """Broker URL without user and password: `amqps://host:port/vhost`."""
    proxy: str | None = None
    """Proxy URL: `https://host:port/v1`."""
    ca: Path | None = None
    """PEM certificate of the authority behind both addresses, if it is not in the clients' system CA store."""
    http: bool = False
    """Whether the client uses only the proxy and gets no RabbitMQ user."""


def make_host_invite(job: SwarmJob, base_urls: tuple[str, ...], *, amqp: str | None = None) -> Invite:
    """Return the host's own invite, with an operator's rights on the broker. `job` has all addresses resolved; `base_urls`
    are its proxies' URLs; `amqp` is the broker's URL for clients, if it differs from the job's."""
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
    """Write the resolved settings and the invite of a run whose processes were started one by one, as `swarmq up` would.

    With these files every command finds the broker. `amqp` and `proxy` are the addresses for clients, where they differ from
    the host's. Raises ConfigError or BrokerError before anything is written.
    """
    folder, url = job.run_folder, resolve_amqp_url(job.broker)
    if folder.endpoints.exists():
        raise ConfigError(f"{folder.path}: this run was started by `swarmq up`, whose invite is in {folder.invite}")
    if url is None:
        raise ConfigError(
            "broker.url is not set: set it, or $SWARMQ_AMQP_URL, to the RabbitMQ that the processes of this run use"
        )
    if proxy is None and not job.proxy.port:
        raise ConfigError(
            "--proxy is missing: give the URL by which clients reach the proxy, or set proxy.host and proxy.port"
        )
    split_nodes(url)  # raises for a malformed URL
    check_amqp_url(amqp or "")
    _check_proxy_url(proxy or "")
    make_folder(folder.path)
    resolved = msgspec.structs.replace(
        job, folder=str(Path(job.folder).resolve()), broker=msgspec.structs.replace(job.broker, url=url)
    )
    ports = range(job.proxy.port, job.proxy.port + job.proxy.count)
    invite = make_host_invite(resolved, (proxy,) if proxy else tuple(map(job.proxy.url, ports)), amqp=amqp)
    if proxy:
        invite = msgspec.structs.replace(invite, base_urls=())
    for base_url in invite.base_urls:  # clients go on using them when a proxy joins from another host
        ProxyRegistry(folder.proxies).add(base_url)
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
    """Register a new client and return its invite. `host` is the run's own invite. Raises ConfigError or BrokerError; a failure
    registers no client."""
    ca = keys.read_certificate(reach.ca) if reach.ca else host.ca
    amqp_url = "" if reach.http else reach.amqp or host.amqp_url
    check_amqp_url(amqp_url)
    _check_proxy_url(reach.proxy or host.base_url)
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
        amqp_url=amqp_url and with_login(amqp_url, user, password),
        base_url=reach.proxy or host.base_url,
        base_urls=() if reach.proxy else host.base_urls,
        invited=not reach.http,
        ca=ca,
    )


def remove_client(folder: RunFolder, name: str, management: ManagementApi) -> None:
    """Revoke a client's keys and close its connections; the episodes it has ended stay. Raises ConfigError if the client is
    unknown."""
    with ClientRegistry.open(folder.clients) as members:
        member = members.entries.get(name)
        if member is None:
            raise ConfigError(f"no client {name!r}: this run has invited {', '.join(members.entries) or 'nobody'}")
        members.remove(name, now=time.time())  # revoke the keys first: that cannot fail, unlike a call to RabbitMQ
        if member.broker_user:
            remove_user(management, member.broker_user, f"client {name}")


def remove_user(management: ManagementApi, user: str, whose: str) -> None:
    """Delete the RabbitMQ user of a client or host that the run refuses already. Raises BrokerError with what is left to do."""
    try:
        management.remove(user)
    except BrokerError as error:
        raise BrokerError(
            f"{whose} is removed from the run, but its RabbitMQ user {user} still exists: {error}. Give the command again when RabbitMQ answers"
        ) from error


def renew_rights(folder: RunFolder, management: ManagementApi) -> None:
    """Update the RabbitMQ rights of clients and hosts that an older version invited. Raises BrokerError."""
    for member in read_clients(folder.clients).values():
        if member.broker_user and member.removed_at is None:
            management.grant(member.broker_user)
    for host in read_hosts(folder.hosts).values():
        if host.removed_at is None:
            management.grant_host(host.broker_user)


def check_amqp_url(url: str) -> None:
    """Raise ConfigError unless `url` is empty or a valid AMQP URL."""
    try:
        if url:
            split_nodes(url)
    except BrokerError as error:
        raise ConfigError(f"--amqp: {error}") from error


def _check_proxy_url(url: str) -> None:
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ConfigError(f"--proxy {url!r} is not a valid address: give http:// or https:// and a host")


def with_login(urls: str, user: str, password: str) -> str:
    """Return `urls` with this user and password in the URL of each node."""

    def change(url: str) -> str:
        parts = urlsplit(url)
        where = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{quote(user)}:{quote(password)}@{where}", path=parts.path or "/"))

    return map_nodes(urls, change)
