"""Invites for hosts that run engines or proxies of a run, or trials of a study, created and revoked on its own host."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec

from swarmq import keys
from swarmq.broker.admin.invitations import ClientAddresses, check_amqp_url, remove_user, with_login
from swarmq.broker.admin.users import ManagementApi
from swarmq.config import RunFolder, SwarmJob
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
    invite = add_user_of_host(
        job.run, folder.hosts, name, management, reach, job.broker.url or "", hours=hours, emits=True
    )
    secret = EngineRegistry(job, folder).secret()
    return msgspec.structs.replace(invite, root=keys.load_root(folder.root_secret), engine_secret=secret)


def add_user_of_host(
    run: str,
    registry: Path,
    name: str,
    management: ManagementApi,
    reach: ClientAddresses,
    broker_url: str,
    *,
    hours: float,
    emits: bool,
) -> HostInvite:
    """Register a host that gets a RabbitMQ user and no secret of a run, and return its invite. `broker_url`: where the host reaches
    RabbitMQ unless `reach` says so. `emits`: whether it publishes events. Raises ConfigError or BrokerError, and then registers no host."""
    amqp_url = reach.amqp or broker_url
    check_amqp_url(amqp_url)
    ca = keys.read_certificate(reach.ca) if reach.ca else b""
    now = time.time()
    with HostRegistry.open(registry) as hosts:
        hosts.check_new(name)
        password = secrets.token_urlsafe(24)
        user = management.add_host(run, name, password, emits=emits)
        expires_at = now + hours * 3600
        hosts.put(InvitedHost(name=name, added_at=now, expires_at=expires_at, broker_user=user))
    return HostInvite(
        run=run,
        host=name,
        user=user,
        amqp_url=with_login(amqp_url, user, password),
        root=b"",
        engine_secret="",
        expires_at=expires_at,
        ca=ca,
    )


def remove_host(job: SwarmJob, folder: RunFolder, name: str, management: ManagementApi) -> InvitedHost:
    """Remove a host: take its engines and proxies out of the run, delete its RabbitMQ user and close its connections. Return what
    it had registered. Raises ConfigError if the host is unknown, BrokerError if RabbitMQ refuses or cannot be reached."""
    with HostRegistry.open(folder.hosts) as hosts:
        host = hosts.get(name)
        for url, policy in host.engines.items():
            EngineRegistry(job, folder).remove(policy, url)
        for url in host.proxies:
            ProxyRegistry(folder.proxies).remove(url)
        hosts.remove(name, now=time.time())
    remove_user(management, host.broker_user, f"host {name}")
    return host


def remove_user_of_host(registry: Path, name: str, management: ManagementApi) -> None:
    """Delete a host's RabbitMQ user and close its connections. Raises ConfigError if the host is unknown, BrokerError if RabbitMQ
    refuses or cannot be reached."""
    with HostRegistry.open(registry) as hosts:
        user = hosts.remove(name, now=time.time()).broker_user
    remove_user(management, user, f"host {name}")
