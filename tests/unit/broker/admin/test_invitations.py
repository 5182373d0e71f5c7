"""Invites for clients of a run whose parts are started one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmq.broker.admin.invitations import invite_host, remove_client
from swarmq.broker.admin.users import ManagementApi
from swarmq.config import SwarmJob
from swarmq.errors import BrokerError
from swarmq.registries.clients import ClientRegistry, InvitedClient, read_revoked
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.processes import reserve_port


def make_job(folder: Path) -> SwarmJob:
    tree = {"run": "r", "folder": str(folder), "broker": {"url": "amqp://u:p@mq1:5672/"}}
    policies = {"main": {"model": "m", "engine": {"urls": ["http://gpu0:8100"]}}}
    return SwarmJob.build(tree | {"policies": policies, "proxy": {"host": "gpu0", "port": 8000, "count": 2}})


def test_clients_use_the_runs_own_proxies_beside_those_that_join_from_other_hosts(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    own = ("http://gpu0:8000/v1", "http://gpu0:8001/v1")
    proxies = ProxyRegistry(job.run_folder.proxies)
    assert invite_host(job).base_urls == own
    assert proxies.urls() == own
    proxies.add("http://gpu1:8000/v1")
    invite_host(job)
    assert proxies.urls() == (*own, "http://gpu1:8000/v1")


def test_a_client_is_refused_by_the_run_also_while_rabbitmq_cannot_be_reached(tmp_path: Path) -> None:
    folder = make_job(tmp_path).run_folder
    with ClientRegistry.open(folder.clients) as clients:
        clients.put(InvitedClient(name="alice", added_at=1.0, broker_user="r.alice"))
    away = ManagementApi.of("amqp://u:p@127.0.0.1:5672/", f"http://127.0.0.1:{reserve_port()}/")
    for _ in range(2):
        with pytest.raises(
            BrokerError, match=r"client alice is removed from the run, but its RabbitMQ user r\.alice still exists"
        ):
            remove_client(folder, "alice", away)
        assert read_revoked(folder.clients) == {"alice"}


def test_clients_with_one_public_address_get_no_list_of_proxies(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert invite_host(job, proxy="https://public/v1").base_urls == ()
    assert ProxyRegistry(job.run_folder.proxies).urls() == ()
