"""The faults of the broker in memory, which other parts' tests rely on."""

from __future__ import annotations

import asyncio

import pytest

from swarmq.broker import topology
from swarmq.errors import BrokerError, BrokerLostError, UnconfirmedError, UnroutableError
from swarmq.messages import EpisodeEnd, Event
from swarmq.testing import MemoryBroker

INBOX = topology.inbox("r")


def end(number: int) -> EpisodeEnd:
    return EpisodeEnd(run="r", episode_id=f"e{number}", status="finished", rewards={"main": 1.0})


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    await broker.declare("r", policies=["main"], kinds=["math"])
    return broker


async def test_an_interrupted_consumer_gets_everything_again_in_order(broker: MemoryBroker) -> None:
    async with broker.consume(INBOX, prefetch=10) as deliveries:
        for number in range(3):
            await broker.publish(INBOX, end(number))
        held = [await anext(deliveries), await anext(deliveries)]
        await held[0].ack()
        broker.interrupt()
        with pytest.raises(BrokerLostError):
            await held[1].ack()
        again = [await anext(deliveries), await anext(deliveries)]
        assert [delivery.key for delivery in again] == ["e1:end", "e2:end"]
        assert all(delivery.is_redelivered for delivery in again)


async def test_a_publisher_waits_for_an_absent_broker(broker: MemoryBroker) -> None:
    broker.away(gone=True)
    waiting = asyncio.ensure_future(broker.publish(INBOX, end(1)))
    with pytest.raises(BrokerError, match="away"):
        await broker.publish(INBOX, end(2), deadline_s=0.01)
    assert not waiting.done()
    broker.away(gone=False)
    await waiting
    assert (await broker.depths([INBOX]))[INBOX].ready == 1


async def test_consumers_of_a_deleted_queue_go_on_when_it_is_made_again(broker: MemoryBroker) -> None:
    async with broker.consume(INBOX, prefetch=1) as deliveries:
        await broker.publish(INBOX, end(1))
        held = await anext(deliveries)
        broker.delete(INBOX)
        with pytest.raises(UnroutableError):
            await broker.publish(INBOX, end(2))
        await broker.declare("r", policies=["main"], kinds=["math"])
        await broker.publish(INBOX, end(2))
        assert (await anext(deliveries)).message == end(2)
        with pytest.raises(BrokerLostError):
            await held.ack()


async def test_a_purge_leaves_what_consumers_hold(broker: MemoryBroker) -> None:
    async with broker.consume(INBOX, prefetch=1) as deliveries:
        await broker.publish(INBOX, end(1))
        await broker.publish(INBOX, end(2))
        held = await anext(deliveries)
        broker.purge(INBOX)
        await held.ack()
        await broker.publish(INBOX, end(3))
        assert (await anext(deliveries)).message == end(3)


async def test_events_are_kept_for_the_test_to_see(broker: MemoryBroker) -> None:
    event = Event(run="r", source="x", name="state", at=0.0)
    await broker.emit(event)
    assert broker.emitted == [event]


async def test_an_alarm_holds_publishers_and_drops_events_and_consumers_go_on(broker: MemoryBroker) -> None:
    await broker.publish(INBOX, end(1))
    broker.alarm(on=True)
    assert await broker.is_blocked()
    assert not await broker.emit(Event(run="r", source="x", name="state", at=0.0))
    with pytest.raises(UnconfirmedError):
        await broker.publish(INBOX, end(2), deadline_s=0.0)
    async with broker.consume(INBOX, prefetch=1) as deliveries:
        assert (await anext(deliveries)).message == end(1)
    broker.alarm(on=False)
    await broker.publish(INBOX, end(2))
