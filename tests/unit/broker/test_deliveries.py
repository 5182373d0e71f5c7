"""A reader of a broker's feed learns that the broker refuses the feed for good, and never waits for what cannot come."""

import asyncio

import pytest

from swarmq.broker.deliveries import Arrival, Deliveries
from swarmq.broker.events import EventFeed
from swarmq.errors import BrokerError
from swarmq.messages import Event, Slot, Task, encode

EVENT = Event(run="r", source="proxy.0", name="state", at=1.0)
TASK = Task(run="r", slot=Slot(task_id="t", repeat=0), kind="k", group_size=1)
REFUSED = BrokerError("access refused")


async def bury(arrival, reason):
    pytest.fail(f"{arrival} was buried: {reason}")


def make_deliveries():
    feed = Deliveries(bury)
    arrival = Arrival(settler=None, tag=1, body=encode(TASK), headers={}, is_redelivered=False, queue="q")
    return feed, arrival, lambda delivery: delivery.message == TASK


def make_events():
    return EventFeed(), encode(EVENT), lambda event: event == EVENT


@pytest.fixture(params=[make_deliveries, make_events])
def feed(request):
    """A feed, an item for it, and whether something that was read is that item."""
    return request.param()


async def test_a_waiting_reader_is_told_that_the_feed_failed(feed):
    queue, _, _ = feed
    reading = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    queue.fail(REFUSED)
    with pytest.raises(BrokerError, match="access refused"):
        await asyncio.wait_for(reading, 10)


async def test_items_that_came_before_the_failure_are_read_first(feed):
    queue, item, is_item = feed
    queue.put(item)
    queue.fail(REFUSED)
    assert is_item(await anext(queue))
    with pytest.raises(BrokerError, match="access refused"):
        await asyncio.wait_for(anext(queue), 10)


async def test_closing_ends_the_loop_of_a_waiting_reader(feed):
    queue, _, _ = feed

    async def read():
        return [item async for item in queue]

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    queue.close()
    assert await asyncio.wait_for(reading, 10) == []
