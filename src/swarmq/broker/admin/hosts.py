"""Invites for hosts that run engines or proxies of a run, created and revoked on the run's own host: `swarmq host`."""

from __future__ import annotations

import secrets
import time

import msgspec

from swarmq import keys
from swarmq.broker.admin.invitations import ClientAddresses, check_amqp_url, remove_user, with_login
from swarmq.broker.admin.users import ManagementApi
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.keys import HostInvite
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.hosts import HostRegistry, InvitedHost
from swarmq.registries.proxies import ProxyRegistry


def add_host(
    job: SwarmJob,
    folder: RunFolder,
    name: str,
    management: ManagementApi,
    reach: ClientAddresses,
    *,
    hours: float,
) -> HostInvite:
    """Register a host and return its invite. Raises ConfigError or BrokerError, and then registers no host."""
    amqp_url = reach.amqp or job.broker.url or ""
    check_amqp_url(amqp_url)
    ca = keys.read_certificate(reach.ca) if reach.ca else b""
    now = time.time()
    with HostRegistry.open(folder.hosts) as hosts:
        hosts.check_new(name)
        password = secrets.token_urlsafe(24)
        user = management.add_host(job.run, name, password)
        expires_at = now + hours * 3600
        hosts.put(InvitedHost(name=name, added_at=now, expires_at=expires_at, broker_user=user))
    return HostInvite(
        run=job.run,
        host=name,
        user=user,
        amqp_url=with_login(amqp_url, user, password),
        root=keys.load_root(folder.root_secret),
        engine_secret=EngineRegistry(job, folder).secret(),
        expires_at=expires_at,
        ca=ca,
    )


def remove_host(job: SwarmJob, folder: RunFolder, name: str, management: ManagementApi) -> InvitedHost:
    """Remove a host: take its engines and proxies out of the run, delete its RabbitMQ user and close its connections. Return what
    it had registered. Raises ConfigError if the host is unknown, BrokerError if RabbitMQ refuses or cannot be reached."""
    with HostRegistry.open(folder.hosts) as hosts:
        if (host := hosts.entries.get(name)) is None:
            raise ConfigError(f"no host {name!r}: this run has invited {', '.join(hosts.entries) or 'none'}")
        for url, policy in host.engines.items():
            EngineRegistry(job, folder).remove(policy, url)
        for url in host.proxies:
            ProxyRegistry(folder.proxies).remove(url)
        hosts.put(msgspec.structs.replace(host, removed_at=host.removed_at or time.time(), engines={}, proxies=()))
    remove_user(management, host.broker_user, f"host {name}")
    return host
