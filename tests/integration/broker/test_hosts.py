"""What RabbitMQ lets an invited host do: everything that engines and proxies of its run need, and nothing in another run."""

import asyncio
import re

import aio_pika
import msgspec
import pytest

from support.broker import is_refused
from swarmq import keys
from swarmq.broker import topology
from swarmq.broker.admin.hosts import add_host, remove_host
from swarmq.broker.admin.invitations import ClientAddresses, renew_rights
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import AmqpBroker
from swarmq.config import SwarmJob
from swarmq.errors import BrokerError
from swarmq.hosts.follow import join_run
from swarmq.messages import EpisodeEnd, Event, Registration, Slot, Task
from swarmq.registries.hosts import HostRegistry, read_hosts
from swarmq.registries.proxies import ProxyRegistry

pytestmark = pytest.mark.broker


@pytest.fixture
def job(broker_node, run_name, tmp_path):
    tree = {"run": run_name, "folder": str(tmp_path), "mix": {"math": 1.0}, "policies": {"main": {"model": "m"}}}
    return SwarmJob.build(tree | {"broker": {"url": broker_node.amqp_url}})


@pytest.fixture
def management(broker_node):
    return ManagementApi.of(broker_node.amqp_url, broker_node.identity.management_login)


@pytest.fixture
async def broker(job):
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker:
        await broker.declare(job.run, policies=job.policies, kinds=job.mix, turn_queues=1)
        yield broker


def invite(job, management, name="gpu2"):
    made = add_host(job, job.run_folder, name, management, ClientAddresses(), hours=1)
    return keys.HostInvite.decode(made.encode())


async def arrived(broker, queue):
    async with broker.consume(queue, prefetch=10) as deliveries:
        delivery = await anext(deliveries)
        await delivery.ack()
        return delivery.message, delivery.arrival.sender


async def test_a_host_publishes_consumes_and_hears_what_its_parts_need(job, management, broker):
    run, made = job.run, invite(job, management)
    async with AmqpBroker.open(made.broker_url, name="gpu2", user=made.user) as remote:
        end = EpisodeEnd(run=run, episode_id="e", status="finished", rewards={"main": 1.0}, client_id="alice@there")
        registration = Registration(
            run=run, registration_id="1", action="join", process="proxy", url="http://gpu2:8000/v1"
        )
        turns = topology.turns(run, 1)
        for queue, message in [(topology.inbox(run), end), (turns, end), (topology.control(run), registration)]:
            await remote.publish(queue, message)
            assert await arrived(broker, queue) == (message, f"{run}.host:gpu2")
        task = Task(run=run, slot=Slot(task_id="t"), kind="math", group_size=1)
        await broker.publish(topology.tasks(run, "math"), task)
        assert (await arrived(remote, topology.tasks(run, "math")))[0] == task
        event = Event(run=run, source="host.gpu2", name="members_wanted", at=1.0, fields={"ask": "1"})
        async with remote.events(run) as events:
            assert await remote.emit(event)
            assert await anext(events) == event


async def test_a_host_that_was_invited_before_there_were_queues_of_turns_gets_the_right_to_them(
    job, management, broker
):
    run, made, turns = job.run, invite(job, management), topology.turns(job.run, 1)
    end = EpisodeEnd(run=run, episode_id="e", status="finished", rewards={"main": 1.0}, client_id="alice@there")
    async with AmqpBroker.open(job.broker.url, name="admin") as admin:
        await admin.declare(
            run, policies=job.policies, kinds=job.mix, turn_queues=2
        )  # another process since the invite
    async with AmqpBroker.open(made.broker_url, name="gpu2", user=made.user) as remote:
        await remote.publish(topology.turns(run, 2), end)
        assert (await arrived(broker, topology.turns(run, 2)))[0] == end
    management._topic_rights(
        made.user, topology.CLIENTS, write=rf"^{re.escape(made.user)}\.(in|control)$"
    )  # as of an older version
    async with AmqpBroker.open(made.broker_url, name="gpu2", user=made.user) as remote:
        with pytest.raises(BrokerError, match=r"turns\.1.* lacks this right.*renewed by the next `swarmq up`"):
            await remote.publish(turns, end)
    renew_rights(job.run_folder, management)
    async with AmqpBroker.open(made.broker_url, name="gpu2", user=made.user) as remote:
        await remote.publish(turns, end)
        assert (await arrived(broker, turns))[0] == end


async def test_without_a_collector_a_host_is_told_where_it_has_asked(job, management, broker):
    made = invite(job, management)
    with pytest.raises(ExceptionGroup) as told:
        async with join_run(made, name="test", patience_s=0.1):
            pass
    [error] = told.value.exceptions
    where = made.amqp_url.rpartition("@")[2].rstrip("/")
    assert f"the collector of run '{job.run}' has not answered within 0.1 s over RabbitMQ at {where}" in str(error)


async def test_a_host_reaches_no_other_run_and_takes_nothing_from_its_own(job, management, broker):
    run, made = job.run, invite(job, management)

    async def publish(channel, exchange, key):
        target = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
        await target.publish(aio_pika.Message(b""), key, mandatory=True)

    async def bind(channel, key):
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(topology.EVENTS, key)

    async def read(channel, name):
        await (await channel.get_queue(name, ensure=False)).get(fail=False)

    assert not await is_refused(made.amqp_url, lambda c: bind(c, f"{run}.#"))
    refused = [
        lambda c: publish(c, topology.CLIENTS, f"{run}.alice.in"),
        lambda c: publish(c, topology.CLIENTS, "other.host:gpu2.in"),
        lambda c: publish(c, "", topology.inbox(run)),
        lambda c: publish(c, topology.EVENTS, "other.collector.members"),
        lambda c: publish(c, topology.DEAD, ""),
        lambda c: bind(c, "#"),
        lambda c: bind(c, "other.#"),
        lambda c: read(c, topology.inbox(run)),
        lambda c: read(c, topology.ready(run, "main")),
        lambda c: c.declare_queue("mine", durable=True),
        lambda c: c.exchange_delete(topology.EVENTS),
    ]
    for act in refused:
        assert await is_refused(made.amqp_url, act)


async def test_a_removed_host_is_out_with_all_that_it_runs(job, management, broker):
    made, proxies = invite(job, management), ProxyRegistry(job.run_folder.proxies)
    invite(job, management, "gpu3")
    proxies.write(["http://gpu2:8000/v1", "http://gpu3:8000/v1"])
    with HostRegistry.open(job.run_folder.hosts) as hosts:
        hosts.put(msgspec.structs.replace(hosts.entries["gpu2"], proxies=("http://gpu2:8000/v1",)))
    async with (
        AmqpBroker.open(made.broker_url, name="gpu2", user=made.user, login_patience_s=0.0) as remote,
        remote.events(job.run) as events,
    ):
        remove_host(job, job.run_folder, "gpu2", management)
        with pytest.raises(BrokerError, match="removed from the run"):
            async with asyncio.timeout(120):
                await anext(events)
    assert proxies.urls() == ("http://gpu3:8000/v1",)
    assert [(host.name, host.removed_at is None) for host in read_hosts(job.run_folder.hosts).values()] == [
        ("gpu2", False),
        ("gpu3", True),
    ]
