"""What happens to publishers and consumers when the broker, the wire or the rights go."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.broker import discarded
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.consumer import open_consumer
from swarmq.broker.deliveries import Deliveries, Delivery
from swarmq.broker.node.process import PrivateNode
from swarmq.broker.publisher import WARN_EVERY_S
from swarmq.errors import BrokerError, BrokerLostError, UnroutableError
from swarmq.messages import EpisodeEnd, Event
from swarmq.testing import TcpRelay
from swarmq.testing.relay import Way

pytestmark = [pytest.mark.broker, pytest.mark.asyncio(loop_scope="module")]

BLOCKED = "publisher_blocked"
WAITING, LOST = "broker_unreachable", "broker_session_lost"
SHORT_HEARTBEAT = "?heartbeat=1"


def end(run: str, number: int) -> EpisodeEnd:
    return EpisodeEnd(run=run, episode_id=f"e{number}", status="finished", rewards={"main": 1.0})


@asynccontextmanager
async def opened(url: str, run: str) -> AsyncIterator[AmqpBroker]:
    async with AmqpBroker.open(url, name="faults", deadline_s=120.0) as broker:
        await broker.declare(run, policies=["main"], kinds=["math"])
        yield broker


async def drain(broker: AmqpBroker, run: str, wanted: int) -> set[str]:
    """Keys of the inbox until `wanted` different ones have come; faults on the way are the point."""
    keys: set[str] = set()
    async with broker.consume(topology.inbox(run), prefetch=50) as deliveries:
        while len(keys) < wanted:
            batch = await deliveries.batch(50)
            keys |= {delivery.key for delivery in batch}
            try:
                await deliveries.ack_through(batch[-1])
            except BrokerLostError:
                continue
    return keys


async def acknowledged(delivery: Delivery, deliveries: Deliveries) -> None:
    """By a machine that may be too slow for this session too: then the same message has come by the next one."""
    while True:
        try:
            await delivery.ack()
        except BrokerLostError:
            key, delivery = delivery.key, await anext(deliveries)
            assert delivery.key == key
        else:
            return


def relayed(node: PrivateNode, relay: TcpRelay, suffix: str = "") -> str:
    return node.amqp_url.replace(str(node.identity.amqp_port), str(relay.port)) + suffix


def data_folders(folder: Path, queue: str) -> list[Path]:
    """Where a private node's quorum queue keeps what it holds."""
    return [path.parent for path in folder.rglob("quorum/*/2F_*/config") if queue.encode() in path.read_bytes()]


async def test_a_killed_broker_loses_nothing_confirmed_and_everybody_goes_on(
    tmp_path: Path, run_name: str, logs
) -> None:
    total, workers = 600, 20
    inbox = topology.inbox(run_name)
    async with (
        discarded(PrivateNode(tmp_path)) as node,
        opened(node.amqp_url, run_name) as broker,
        asyncio.timeout(600),
    ):
        third, confirmed = asyncio.Event(), 0

        async def publish(numbers: range) -> None:
            nonlocal confirmed
            for number in numbers:
                await broker.publish(inbox, end(run_name, number))
                confirmed += 1
                if confirmed >= total // 3:
                    third.set()

        async with asyncio.TaskGroup() as group:
            draining = group.create_task(drain(broker, run_name, total))
            for worker in range(workers):
                group.create_task(publish(range(worker, total, workers)))
            await third.wait()
            await node.kill()
            await logs.seen(LOST)
            assert confirmed < total
            await node.start()
        assert draining.result() == {f"e{number}:end" for number in range(total)}
        back = await logs.seen("broker_reachable")
        assert (logs.count(LOST), logs.count(WAITING)) == (1, 0), "one line, however many connections it has"
        assert back["connections"] == 3


async def test_a_queue_that_a_crash_left_half_deleted_is_found_dead_and_made_again(
    tmp_path: Path, run_name: str
) -> None:
    """RabbitMQ 4.3 brings such a queue up empty; 3.10 and 4.0 list it and cannot use it."""
    queue, other = topology.tickets(run_name, "math"), topology.ready(run_name, "main")
    async with discarded(PrivateNode(tmp_path)) as node:
        async with opened(node.amqp_url, run_name):
            pass
        await node.kill()
        (data,) = data_folders(tmp_path, queue)
        shutil.rmtree(data)  # what deletes a queue does first; that the broker forgets its name comes later
        await node.start()
        async with opened(node.amqp_url, run_name) as broker:
            assert set(await broker.depths([queue, other])) == {queue, other}
            await broker.delete_if_dead(queue)
            await broker.declare(run_name, policies=["main"], kinds=["math"])
            await broker.publish(queue, end(run_name, 1), deadline_s=60.0)
            assert (await broker.depths([queue]))[queue].ready == 1
            for alive in (queue, other, topology.DEAD, "nothing of this name"):
                assert not await broker.delete_if_dead(alive)
            assert (await broker.depths([queue, other]))[queue].ready == 1


@pytest.mark.parametrize(
    ("limit", "low", "back"),
    [
        ("set_vm_memory_high_watermark", ("absolute", "1MB"), ("absolute", "1500MB")),
        ("set_disk_free_limit", ("900000000000000",), ("50MB",)),
    ],
    ids=["memory", "disk"],
)
async def test_an_alarm_blocks_publishers_visibly_and_consumers_not_at_all(
    node: PrivateNode, run_name: str, logs, limit: str, low: tuple[str, ...], back: tuple[str, ...]
) -> None:
    async with opened(node.amqp_url, run_name) as broker, asyncio.timeout(600):
        for number in range(5):
            await broker.publish(topology.inbox(run_name), end(run_name, number))
        await node.ctl(limit, *low)
        try:
            async with asyncio.TaskGroup() as group:
                waiting = [
                    group.create_task(broker.publish(topology.inbox(run_name), end(run_name, number)))
                    for number in range(5, 10)
                ]
                await logs.seen(BLOCKED)
                assert await broker.is_blocked()
                assert await drain(broker, run_name, 5) == {f"e{number}:end" for number in range(5)}
                assert not await broker.emit(Event(run=run_name, source="x", name="state", at=0.0))
                with pytest.raises(BrokerError, match=r"not confirmed .*alarm"):
                    await broker.publish(topology.inbox(run_name), end(run_name, 5), deadline_s=0.5)
                assert not any(task.done() for task in waiting)
                await node.ctl(limit, *back)
        finally:
            await node.ctl(limit, *back)
        assert await drain(broker, run_name, 5) == {f"e{number}:end" for number in range(5, 10)}
        assert logs.count(BLOCKED) == 1
        await logs.seen("publisher_unblocked")


async def test_who_publishes_nothing_can_ask_whether_an_alarm_is_on(node: PrivateNode, run_name: str) -> None:
    async with opened(node.amqp_url, run_name) as broker, asyncio.timeout(600):
        assert not await broker.is_blocked()
        await node.ctl("set_disk_free_limit", "900000000000000")
        try:
            assert await broker.is_blocked()
        finally:
            await node.ctl("set_disk_free_limit", "50MB")
        while await broker.is_blocked():  # noqa: ASYNC110 - RabbitMQ takes its time to look
            await asyncio.sleep(0.1)


async def test_a_full_queue_makes_publishers_wait_and_drops_nothing(node: PrivateNode, run_name: str, logs) -> None:
    inbox, total, workers = topology.inbox(run_name), 200, 4  # few at a time: the limit is a soft one
    began = time.monotonic()

    async def publish(numbers: range) -> None:
        for number in numbers:
            await broker.publish(inbox, end(run_name, number))

    async with opened(node.amqp_url, run_name) as broker, asyncio.timeout(600):
        await node.ctl("set_policy", run_name, f"^{inbox}$".replace(".", r"\."), '{"max-length": 5}')
        try:
            async with asyncio.TaskGroup() as group:
                for worker in range(workers):
                    group.create_task(publish(range(worker, total, workers)))
                await logs.seen("queue_full")
                draining = group.create_task(drain(broker, run_name, total))
        finally:
            await node.ctl("clear_policy", run_name)
        assert draining.result() == {f"e{number}:end" for number in range(total)}
        assert 1 <= logs.count("queue_full") <= 1 + (time.monotonic() - began) // WARN_EVERY_S


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda url: url.replace("swarmq:", "swarmq:x", 1), "refused user or password"),
        (lambda url: url + "no-such-vhost", "no-such-vhost refused .* virtual host"),
        (lambda _: "http://127.0.0.1:5672", "needs amqp://"),
        (lambda _: "amqp://127.0.0.1:notaport", "malformed"),
        (lambda _: "", "needs amqp://"),
    ],
    ids=["password", "vhost", "scheme", "port", "empty"],
)
async def test_a_broker_that_can_never_work_is_refused_at_once(node: PrivateNode, change, words: str) -> None:
    with pytest.raises(BrokerError, match=words) as refusal:
        async with AmqpBroker.open(change(node.amqp_url), name="x", deadline_s=None):
            pass
    assert node.identity.password not in str(refusal.value)


async def test_an_unreachable_broker_is_waited_for_and_then_named(node: PrivateNode, logs) -> None:
    async with TcpRelay.to("127.0.0.1", 1) as relay:
        with pytest.raises(BrokerError, match=rf"127\.0\.0\.1:{relay.port} cannot be reached .*start it .*or correct"):
            async with AmqpBroker.open(relayed(node, relay), name="x", deadline_s=3.0):
                pass
    assert logs.count(WAITING) == 1


async def test_a_broker_that_comes_up_later_is_found(node: PrivateNode, run_name: str, logs) -> None:
    async with TcpRelay.to("127.0.0.1", node.identity.amqp_port) as relay, asyncio.TaskGroup() as group:
        relay.cut(refuse=True)

        async def use() -> None:
            async with opened(relayed(node, relay), run_name) as broker:
                await broker.publish(topology.inbox(run_name), end(run_name, 0))

        group.create_task(use())
        await logs.seen(WAITING)
        relay.release()


async def test_a_wire_cut_again_and_again_loses_nothing(node: PrivateNode, run_name: str) -> None:
    total, cuts = 300, 6
    async with (
        TcpRelay.to("127.0.0.1", node.identity.amqp_port) as relay,
        opened(relayed(node, relay), run_name) as broker,
        asyncio.timeout(600),
    ):

        async def publish(number: int) -> None:
            await broker.publish(topology.inbox(run_name), end(run_name, number))

        async with asyncio.TaskGroup() as group:
            draining = group.create_task(drain(broker, run_name, total))
            for number in range(0, total, total // cuts):
                relay.cut_after(5000 + number)  # in the middle of some frame
                await asyncio.gather(*(publish(n) for n in range(number, number + total // cuts)))
        assert draining.result() == {f"e{number}:end" for number in range(total)}
        assert relay.connections > 2 * cuts


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way.BOTH, Way.ANSWERS, Way.REQUESTS], ids=["black-hole", "deaf", "mute"])
async def test_a_silent_wire_is_noticed_and_replaced(node: PrivateNode, run_name: str, way: Way, logs) -> None:
    async with (
        TcpRelay.to("127.0.0.1", node.identity.amqp_port) as relay,
        opened(relayed(node, relay, SHORT_HEARTBEAT), run_name) as broker,
        broker.consume(topology.inbox(run_name), prefetch=1) as deliveries,
        asyncio.timeout(600),
        asyncio.TaskGroup() as group,
    ):
        relay.hold(way)
        group.create_task(broker.publish(topology.inbox(run_name), end(run_name, 1)))
        await logs.seen("broker_session_lost")
        relay.release()
        assert (await anext(deliveries)).key == "e1:end"


async def test_a_changed_password_is_waited_out_once_connected(node: PrivateNode, run_name: str, logs) -> None:
    async with (
        TcpRelay.to("127.0.0.1", node.identity.amqp_port) as relay,
        opened(relayed(node, relay), run_name) as broker,
        asyncio.timeout(600),
    ):
        await node.ctl("change_password", node.identity.user, "another")
        try:
            relay.cut()
            event = await logs.seen(WAITING, connection="faults.publish")
            assert "refused user or password" in event["reason"]
            with pytest.raises(BrokerError, match="refused user or password"):
                await broker.publish(topology.inbox(run_name), end(run_name, 1), deadline_s=0.2)
        finally:
            await node.ctl("change_password", node.identity.user, node.identity.password)
        await broker.publish(topology.inbox(run_name), end(run_name, 1))


async def test_a_consumer_over_the_brokers_patience_gets_its_message_again(tmp_path: Path, run_name: str) -> None:
    impatient = PrivateNode(
        tmp_path, config="consumer_timeout = 2000\n", advanced="[{rabbit, [{channel_tick_interval, 1000}]}]."
    )
    async with discarded(impatient) as node, opened(node.amqp_url, run_name) as broker, asyncio.timeout(600):
        inbox = topology.inbox(run_name)
        await broker.publish(inbox, end(run_name, 1))
        patient = open_consumer(
            node.amqp_url, inbox, prefetch=1, name="x", bury=broker._bury, ack_s=2.0, recycle_s=3600.0
        )
        async with patient as deliveries:
            held = await anext(deliveries)
            again = await anext(deliveries)
            assert again.key == held.key
            assert again.is_redelivered
            with pytest.raises(BrokerLostError):
                await held.ack()
            await acknowledged(again, deliveries)


async def test_a_consumer_recycles_itself_before_the_broker_loses_patience(
    node: PrivateNode, run_name: str, logs
) -> None:
    async with opened(node.amqp_url, run_name) as broker, asyncio.timeout(600):
        inbox = topology.inbox(run_name)
        await broker.publish(inbox, end(run_name, 1))
        consumer = open_consumer(node.amqp_url, inbox, prefetch=5, name="x", bury=broker._bury, recycle_s=0.5)
        async with consumer as deliveries:
            held = await anext(deliveries)
            again = await anext(deliveries)
            assert again.key == held.key
            await acknowledged(again, deliveries)
        assert any("recycled" in event.get("reason", "") for event in logs.events)


async def test_a_consumer_waits_for_a_deleted_queue_to_be_made_again(node: PrivateNode, run_name: str, logs) -> None:
    async with opened(node.amqp_url, run_name) as broker, asyncio.timeout(600):
        inbox = topology.inbox(run_name)
        async with broker.consume(inbox, prefetch=1) as deliveries:
            await node.ctl("delete_queue", inbox)
            with pytest.raises(UnroutableError, match=inbox):
                await broker.publish(inbox, end(run_name, 1))
            await logs.seen(WAITING)
            await broker.declare(run_name, policies=["main"], kinds=["math"])
            await broker.publish(inbox, end(run_name, 2))
            assert (await anext(deliveries)).key == "e2:end"


async def test_a_queue_with_other_arguments_is_refused_with_its_name(node: PrivateNode, run_name: str) -> None:
    async with AmqpBroker.open(node.amqp_url, name="x", deadline_s=120.0) as broker, asyncio.timeout(600):
        await broker.declare(run_name, policies=[], kinds=[])
        session = await broker._control.session()  # type: ignore[union-attr]
        await session.call(session.channel.declare_queue(topology.ready(run_name, "main"), durable=True))
        with pytest.raises(BrokerError, match=f"inequivalent arg.*{run_name}.main.ready"):
            await broker.declare(run_name, policies=["main"], kinds=[])
        await broker.declare(run_name, policies=[], kinds=[])


async def test_a_client_with_only_the_right_to_write_can_publish(node: PrivateNode, run_name: str, logs) -> None:
    await node.ctl("add_user", run_name, "secret")
    await node.ctl("set_permissions", run_name, "^$", r"^amq\.default$", "^$")
    limited = f"amqp://{run_name}:secret@127.0.0.1:{node.identity.amqp_port}/"
    async with (
        opened(node.amqp_url, run_name) as owner,
        AmqpBroker.open(limited, name="limited", deadline_s=120.0) as broker,
        asyncio.timeout(600),
    ):
        inbox = topology.inbox(run_name)
        await broker.emit(Event(run=run_name, source="x", name="state", at=0.0))  # refused, and nobody notices
        await broker.publish(inbox, end(run_name, 1))
        with pytest.raises(UnroutableError):
            await broker.publish(topology.inbox("nobody"), end(run_name, 1))
        with pytest.raises(BrokerError, match="lacks this right"):
            async with broker.consume(inbox, prefetch=1):
                pass
        assert await drain(owner, run_name, 1) == {"e1:end"}
        assert logs.count("broker_session_lost") == 0


async def test_a_client_that_may_not_write_is_told_so(node: PrivateNode, run_name: str) -> None:
    await node.ctl("add_user", run_name, "secret")
    await node.ctl("set_permissions", run_name, "^$", "^$", "^$")
    url = f"amqp://{run_name}:secret@127.0.0.1:{node.identity.amqp_port}/"
    async with AmqpBroker.open(url, name="limited", deadline_s=120.0) as broker, asyncio.timeout(600):
        with pytest.raises(BrokerError, match="lacks this right"):
            await broker.publish(topology.inbox(run_name), end(run_name, 1))
