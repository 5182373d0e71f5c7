"""What every broker promises: one suite for the one in memory, for RabbitMQ, and for a RabbitMQ cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest

from swarmq.broker import Broker, Delivery, Depth, topology
from swarmq.broker.admin.dead_letters import list_letters
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.message_batches import KIND as BATCH
from swarmq.broker.message_batches import pack
from swarmq.errors import BrokerLostError, MessageError, UnroutableError
from swarmq.messages import (
    MAX_MESSAGE_BYTES,
    EpisodeEnd,
    Event,
    Message,
    PackedMessage,
    RefusedTurn,
    Rollout,
    Slot,
    Task,
    Turn,
    encode,
    idempotency_key,
)
from swarmq.testing import MemoryBroker

SOON_S = 30.0
"""Long enough for a busy machine; a passing test never waits for it."""


class Bench(msgspec.Struct):
    """A broker with a declared run, and what a test needs beyond the protocol."""

    broker: Broker
    run: str
    put: Callable[..., Awaitable[None]]
    """Takes a queue, a body and, by name, the message's kind."""
    listed: Callable[[], Awaitable[list[tuple[bytes, str, str, str]]]]
    """Lists the (body, key, queue, reason) of the dead letters of this run."""

    @property
    def inbox(self) -> str:
        return topology.inbox(self.run)

    @property
    def tasks(self) -> str:
        return topology.tasks(self.run, "math")

    async def dead(self, count: int) -> list[tuple[bytes, str, str, str]]:
        """Return the dead letters of this run when there are `count`: another test's reader hides some of them for a moment."""
        async with asyncio.timeout(60):
            while len(found := await self.listed()) < count:  # noqa: ASYNC110 - RabbitMQ tells nobody that a letter came back
                await asyncio.sleep(0.05)
        return found


@pytest.fixture(params=["memory", *(pytest.param(name, marks=pytest.mark.broker) for name in ("rabbitmq", "cluster"))])
async def bench(request: pytest.FixtureRequest, run_name: str) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            bench = in_memory(run_name)
        else:
            own = request.param == "cluster"
            url = request.getfixturevalue("cluster").cluster.amqp_url if own else request.getfixturevalue("amqp_url")
            broker = await stack.enter_async_context(AmqpBroker.open(url, name="contract"))
            bench = on_rabbitmq(broker, url, run_name)
        await bench.broker.declare(run_name, policies=["main"], kinds=["math"])
        await stack.enter_async_context(asyncio.timeout(SOON_S))
        yield bench


def in_memory(run: str) -> Bench:
    broker = MemoryBroker()

    async def put(queue: str, body: bytes, kind: str = "") -> None:
        broker.put(queue, body, kind=kind)

    async def listed() -> list[tuple[bytes, str, str, str]]:
        return [
            (
                stored.body,
                stored.headers.get("x-sq-id", ""),
                stored.headers["x-sq-queue"],
                stored.headers["x-sq-reason"],
            )
            for stored in broker.stored(topology.DEAD)
        ]

    return Bench(broker, run, put, listed)


def on_rabbitmq(broker: AmqpBroker, url: str, run: str) -> Bench:
    async def put(queue: str, body: bytes, kind: str = "") -> None:
        await broker._publisher.publish(queue, body, kind=kind, headers={}, deadline_s=None)

    async def listed() -> list[tuple[bytes, str, str, str]]:
        found = await list_letters(url)
        return [(x.body, x.key, x.queue, x.reason) for x in found if x.queue.startswith(f"swarmq.{run}.")]

    return Bench(broker, run, put, listed)


def end(run: str, number: int) -> EpisodeEnd:
    return EpisodeEnd(run=run, episode_id=f"e{number}", status="finished", rewards={"main": float(number)})


def task(run: str, number: int) -> Task:
    return Task(run=run, slot=Slot(task_id=f"t{number}"), kind="math", group_size=1)


def rollout(run: str, number: int) -> Rollout:
    return Rollout(
        run=run,
        policy="main",
        episode_id=f"e{number}",
        slot=Slot(task_id="t", repeat=number),
        kind="math",
        group_id="g",
        group_members=40,
        group_size=40,
        reward=1.0,
        turns=(),
    )


def poison(run: str, episode_id: str, *, prompt_ids: bytes) -> Turn:
    """A turn whose prompt is no whole number of tokens."""
    return Turn(
        run=run,
        episode_id=episode_id,
        policy="main",
        call_id="r.0",
        request_id="r",
        prompt_ids=prompt_ids,
        sampled_ids=b"",
        logprobs=b"",
    )


async def publish_ends(bench: Bench, count: int) -> list[EpisodeEnd]:
    ends = [end(bench.run, number) for number in range(count)]
    for message in ends:
        await bench.broker.publish(bench.inbox, message)
    return ends


async def take(bench: Bench, queue: str, count: int, *, ack: bool = True) -> list[Delivery]:
    """Consume `count` deliveries, then close."""
    taken: list[Delivery] = []
    async with bench.broker.consume(queue, prefetch=100) as deliveries:
        while len(taken) < count:
            taken.append(await anext(deliveries))
            if ack:
                await taken[-1].ack()
    return taken


async def test_what_was_published_arrives_in_order(bench: Bench) -> None:
    ends = await publish_ends(bench, 20)
    taken = await take(bench, bench.inbox, 20)
    assert [delivery.message for delivery in taken] == ends
    assert [delivery.key for delivery in taken] == [idempotency_key(message) for message in ends]
    assert taken[0].body == encode(ends[0])
    assert not taken[0].is_redelivered


async def test_messages_published_together_keep_their_order(bench: Bench) -> None:
    ends = [end(bench.run, number) for number in range(50)]
    async with asyncio.TaskGroup() as group:
        for message in ends:
            group.create_task(bench.broker.publish(bench.inbox, message))
    assert [delivery.message for delivery in await take(bench, bench.inbox, 50)] == ends


async def test_what_was_not_acknowledged_comes_again(bench: Bench) -> None:
    ends = await publish_ends(bench, 3)
    first = await take(bench, bench.inbox, 3, ack=False)
    again = await take(bench, bench.inbox, 3)
    assert [delivery.message for delivery in again] == ends
    assert all(delivery.is_redelivered for delivery in again)
    assert [delivery.key for delivery in again] == [delivery.key for delivery in first]


async def test_what_a_closed_consumer_held_comes_before_what_waited_behind_it(bench: Bench) -> None:
    """The collector consumes a queue again with another prefetch, and takes a fence for the end of all turns before it."""
    ends = await publish_ends(bench, 40)
    for prefetch in (4, 16, 100):
        async with bench.broker.consume(bench.inbox, prefetch=prefetch) as deliveries:
            taken = [await anext(deliveries), await anext(deliveries)]
            await deliveries.ack_through(taken[-1])
        assert [delivery.message for delivery in taken] == ends[:2]
        del ends[:2]
    assert [delivery.message for delivery in await take(bench, bench.inbox, len(ends))] == ends


async def test_what_was_acknowledged_does_not_come_again(bench: Bench) -> None:
    ends = await publish_ends(bench, 3)
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        await (await anext(deliveries)).ack()
    assert [delivery.message for delivery in await take(bench, bench.inbox, 2)] == ends[1:]


async def test_an_acknowledgement_after_the_consumer_closed_says_that_it_comes_again(bench: Bench) -> None:
    await publish_ends(bench, 1)
    [delivery] = await take(bench, bench.inbox, 1, ack=False)
    with pytest.raises(BrokerLostError):
        await delivery.ack()


async def test_acknowledging_twice_does_nothing(bench: Bench) -> None:
    await publish_ends(bench, 2)
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        first = await anext(deliveries)
        await first.ack()
        await first.ack()
        second = await anext(deliveries)
        await second.ack()
        await deliveries.ack_through(second)


async def test_acknowledging_one_leaves_those_before_it(bench: Bench) -> None:
    ends = await publish_ends(bench, 3)
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        taken = [await anext(deliveries) for _ in range(3)]
        await taken[1].ack()
    assert [delivery.message for delivery in await take(bench, bench.inbox, 2)] == [ends[0], ends[2]]


async def test_ack_through_covers_what_came_before_and_nothing_after(bench: Bench) -> None:
    ends = await publish_ends(bench, 5)
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        taken = [await anext(deliveries) for _ in range(5)]
        await taken[1].ack()
        await deliveries.ack_through(taken[2])
    assert [delivery.message for delivery in await take(bench, bench.inbox, 2)] == ends[3:]


async def test_a_batch_waits_for_one_and_takes_no_more_than_its_limit(bench: Bench) -> None:
    async with bench.broker.consume(bench.inbox, prefetch=100) as deliveries, asyncio.TaskGroup() as group:
        waiting = group.create_task(deliveries.batch(3))
        await asyncio.sleep(0)
        assert not waiting.done()
        ends = await publish_ends(bench, 7)
        taken = await waiting
        while len(taken) < 7:
            batch = await deliveries.batch(3)
            assert 1 <= len(batch) <= 3
            taken += batch
        assert [delivery.message for delivery in taken] == ends
        await deliveries.ack_through(taken[-1])


async def test_no_more_than_prefetch_is_held(bench: Bench) -> None:
    for number in range(3):
        await bench.broker.publish(bench.tasks, task(bench.run, number))
    async with (
        bench.broker.consume(bench.tasks, prefetch=1) as one,
        bench.broker.consume(bench.tasks, prefetch=2) as other,
    ):
        held = [await anext(one), await anext(other), await anext(other)]
        assert {delivery.message.slot.task_id for delivery in held} == {"t0", "t1", "t2"}
        for delivery in held:
            await delivery.ack()


async def test_a_dead_workers_task_goes_to_another(bench: Bench) -> None:
    async with bench.broker.consume(bench.tasks, prefetch=1) as survivor:
        async with bench.broker.consume(bench.tasks, prefetch=1) as doomed:
            for number in range(2):
                await bench.broker.publish(bench.tasks, task(bench.run, number))
            lost = await anext(doomed)
            mine = await anext(survivor)
        await mine.ack()
        again = await anext(survivor)
        assert again.message == lost.message
        assert again.is_redelivered
        await again.ack()


async def test_the_inbox_has_one_active_consumer_and_the_next_takes_over(bench: Bench) -> None:
    ends = await publish_ends(bench, 4)
    async with bench.broker.consume(bench.inbox, prefetch=1) as active:
        first = await anext(active)
        async with bench.broker.consume(bench.inbox, prefetch=10) as standby:
            waiting = asyncio.ensure_future(anext(standby))
            await first.ack()
            second = await anext(active)
            assert second.message == ends[1]
            assert not waiting.done()
            waiting.cancel()
    assert [delivery.message for delivery in await take(bench, bench.inbox, 3)] == ends[1:]


async def test_a_message_to_no_queue_is_refused_and_others_still_pass(bench: Bench) -> None:
    missing = topology.inbox("no-such-run")
    results = await asyncio.gather(
        bench.broker.publish(missing, end(bench.run, 1)),
        bench.broker.publish(bench.inbox, end(bench.run, 2)),
        bench.broker.publish(missing, end(bench.run, 1)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [UnroutableError, type(None), UnroutableError]
    assert missing in str(results[0])
    assert [delivery.key for delivery in await take(bench, bench.inbox, 1)] == ["e2:end"]


async def test_a_missing_queue_cannot_be_consumed(bench: Bench) -> None:
    with pytest.raises(UnroutableError, match="no-such-run"):
        async with bench.broker.consume(topology.inbox("no-such-run"), prefetch=1):
            pass


async def test_two_sendings_of_a_fact_have_one_key(bench: Bench) -> None:
    for _ in range(2):
        await bench.broker.publish(bench.inbox, end(bench.run, 7))
    first, second = await take(bench, bench.inbox, 2)
    assert first.key == second.key == "e7:end"


async def test_a_record_that_is_too_large_is_refused_before_it_leaves(bench: Bench) -> None:
    huge = EpisodeEnd(run=bench.run, episode_id="e", status="failed", metadata={"x": "y" * 9_000_000})
    with pytest.raises(MessageError, match="over the limit"):
        await bench.broker.publish(bench.inbox, huge)


@pytest.mark.parametrize(
    "body",
    [b"garbage", b"", encode(end("r", 1))[:-3], b"\x91" * 100_000, msgspec.msgpack.encode({"type": "unheard-of"})],
    ids=["garbage", "empty", "truncated", "deep", "unknown-type"],
)
async def test_poison_is_parked_with_its_reason_and_its_neighbours_arrive(bench: Bench, body: bytes) -> None:
    await bench.broker.publish(bench.inbox, end(bench.run, 1))
    await bench.put(bench.inbox, body)
    await bench.broker.publish(bench.inbox, end(bench.run, 2))
    assert [delivery.key for delivery in await take(bench, bench.inbox, 2)] == ["e1:end", "e2:end"]
    [(dead_body, _, queue, reason)] = await bench.dead(1)
    assert (dead_body, queue) == (body, bench.inbox)
    assert "not a swarmq record" in reason


async def put_batch(bench: Bench, *messages: PackedMessage) -> None:
    await bench.put(bench.inbox, pack(bench.run, messages).body, kind=BATCH)


def packed(message: Message) -> PackedMessage:
    return PackedMessage(str(message.__struct_config__.tag), idempotency_key(message), encode(message))


async def test_the_messages_of_a_batch_arrive_one_by_one_among_others(bench: Bench) -> None:
    ends = [end(bench.run, number) for number in range(5)]
    await bench.broker.publish(bench.inbox, ends[0])
    await put_batch(bench, *map(packed, ends[1:4]))
    await bench.broker.publish(bench.inbox, ends[4])
    taken = await take(bench, bench.inbox, 5)
    assert [delivery.message for delivery in taken] == ends
    assert [delivery.key for delivery in taken] == [idempotency_key(message) for message in ends]
    assert [delivery.body for delivery in taken] == [encode(message) for message in ends]
    assert await take_redelivered(bench) == []


async def test_rollouts_that_are_published_together_arrive_one_by_one_and_share_messages(bench: Bench) -> None:
    rollouts = [rollout(bench.run, number) for number in range(40)]
    ready = topology.ready(bench.run, "main")
    await asyncio.gather(*(bench.broker.publish(ready, one) for one in rollouts))
    if isinstance(bench.broker, AmqpBroker):
        assert (await bench.broker.depths([ready]))[ready].ready < len(rollouts)
    taken = await take(bench, ready, len(rollouts))
    assert [delivery.message for delivery in taken] == rollouts
    assert [delivery.key for delivery in taken] == [idempotency_key(message) for message in rollouts]


async def test_a_batch_comes_again_whole_unless_all_its_messages_are_acknowledged(bench: Bench) -> None:
    await put_batch(bench, *(packed(end(bench.run, number)) for number in range(3)))
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        for delivery in await deliveries.batch(2):
            await delivery.ack()
    assert await take_redelivered(bench, ack=3) == ["e0:end", "e1:end", "e2:end"]
    assert await take_redelivered(bench) == []


async def test_what_came_before_a_batch_is_acknowledged_through_a_part_of_it(bench: Bench) -> None:
    await bench.broker.publish(bench.inbox, end(bench.run, 0))
    await put_batch(bench, packed(end(bench.run, 1)), packed(end(bench.run, 2)))
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        first = [await anext(deliveries), await anext(deliveries)]
        await deliveries.ack_through(first[-1])
    assert await take_redelivered(bench) == ["e1:end", "e2:end"]
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        last = [await anext(deliveries), await anext(deliveries)]
        await deliveries.ack_through(last[-1])
    assert await take_redelivered(bench) == []


async def take_redelivered(bench: Bench, *, ack: int = 0) -> list[str]:
    """Return the keys of the messages that are in the inbox, and acknowledge the first ones."""
    await bench.broker.publish(bench.inbox, end(bench.run, 99))
    keys: list[str] = []
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        async for delivery in deliveries:
            if delivery.key == "e99:end":
                await delivery.ack()
                return keys
            keys.append(delivery.key)
            if len(keys) <= ack:
                await delivery.ack()
    return keys


async def test_poison_in_a_batch_is_parked_alone(bench: Bench) -> None:
    bad = poison(bench.run, "e", prompt_ids=b"\0\0\0")
    await put_batch(
        bench,
        packed(end(bench.run, 1)),
        PackedMessage("end", "rubbish", b"\xc1"),
        packed(bad),
        packed(end(bench.run, 2)),
    )
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        first, refused, last = await deliveries.batch(10)
        assert [first.key, last.key] == ["e1:end", "e2:end"]
        assert isinstance(refused.message, RefusedTurn)
        assert (refused.message.episode_id, refused.message.call_id) == ("e", "r.0")
        await bench.broker.dead_letter(refused, "no turn")
        await deliveries.ack_through(last)
    parked = {(body, key, queue) for body, key, queue, _ in await bench.dead(2)}
    assert parked == {(b"\xc1", "rubbish", bench.inbox), (encode(bad), "e:r.0", bench.inbox)}
    assert await take_redelivered(bench) == []


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode({"type": "batch", "run": "r", "messages": []})])
async def test_a_batch_that_is_no_batch_is_parked(bench: Bench, body: bytes) -> None:
    await bench.put(bench.inbox, body, kind=BATCH)
    await bench.broker.publish(bench.inbox, end(bench.run, 2))
    await take(bench, bench.inbox, 1)
    [(dead_body, _, queue, _)] = await bench.dead(1)
    assert (dead_body, queue) == (body, bench.inbox)


async def test_messages_that_are_published_at_once_arrive_once_and_in_order(bench: Bench) -> None:
    ends = [end(bench.run, number) for number in range(300)]
    async with asyncio.TaskGroup() as tasks:
        for message in ends:
            tasks.create_task(bench.broker.publish(bench.inbox, message))
    assert [delivery.message for delivery in await take(bench, bench.inbox, 300)] == ends
    assert await take_redelivered(bench) == []


async def test_a_turn_that_is_poison_is_told_to_its_reader_who_parks_it(bench: Bench) -> None:
    turn = poison(bench.run, "e:1", prompt_ids=b"\1")
    await bench.broker.publish(bench.inbox, turn)
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        delivery = await anext(deliveries)
        told = delivery.message
        assert isinstance(told, RefusedTurn)
        assert (told.run, told.episode_id, told.call_id) == (bench.run, "e:1", "r.0")
        assert await bench.dead(0) == []
        await bench.broker.dead_letter(delivery, told.reason)
    assert await bench.dead(1) == [(encode(turn), "e:1:r.0", bench.inbox, told.reason)]
    assert "not whole int32 values" in told.reason


async def test_a_record_of_absurd_size_is_poison(bench: Bench) -> None:
    huge = EpisodeEnd(run=bench.run, episode_id="e", status="failed", metadata={"x": "y" * MAX_MESSAGE_BYTES})
    await bench.put(bench.inbox, msgspec.msgpack.encode(huge))
    await bench.broker.publish(bench.inbox, end(bench.run, 2))
    await take(bench, bench.inbox, 1)
    [(_, _, _, reason)] = await bench.dead(1)
    assert f"over the limit of {MAX_MESSAGE_BYTES}" in reason


async def test_an_infinite_reward_is_poison(bench: Bench) -> None:
    body = msgspec.msgpack.encode(
        {"type": "end", "run": bench.run, "episode_id": "e", "status": "finished", "rewards": {"main": float("nan")}}
    )
    await bench.put(bench.inbox, body)
    await bench.broker.publish(bench.inbox, end(bench.run, 2))
    await take(bench, bench.inbox, 1)
    [(_, _, _, reason)] = await bench.dead(1)
    assert "rewards.main is nan" in reason


async def test_a_delivery_can_be_parked_with_a_reason_and_is_gone_from_its_queue(bench: Bench) -> None:
    await publish_ends(bench, 2)
    async with bench.broker.consume(bench.inbox, prefetch=10) as deliveries:
        unusable = await anext(deliveries)
        await bench.broker.dead_letter(unusable, "token id 900000 is outside the vocabulary")
    assert [delivery.key for delivery in await take(bench, bench.inbox, 1)] == ["e1:end"]
    assert await bench.dead(1) == [(unusable.body, "e0:end", bench.inbox, "token id 900000 is outside the vocabulary")]


async def test_events_reach_every_listener_of_their_run_and_nobody_else(bench: Bench) -> None:
    mine = Event(run=bench.run, source="learner.main", name="step", at=1.0, fields={"loss": 0.5})
    other = Event(run="another-run", source="learner.main", name="step", at=2.0)
    last = Event(run=bench.run, source="collector", name="state", at=3.0)
    async with bench.broker.events(bench.run) as one, bench.broker.events(bench.run) as two:
        for event in (mine, other, last):
            await bench.broker.emit(event)
        for listener in (one, two):
            assert [await anext(listener), await anext(listener)] == [mine, last]


async def test_events_that_are_emitted_together_arrive_in_order(bench: Bench) -> None:
    events = [Event(run=bench.run, source="collector", name="episode", at=float(n), fields={"n": n}) for n in range(20)]
    async with bench.broker.events(bench.run) as everybody, bench.broker.events(bench.run, senders=("proxy",)) as few:
        assert await bench.broker.emit(*events)
        assert await bench.broker.emit(Event(run=bench.run, source="proxy.0", name="state", at=99.0))
        assert [await anext(everybody) for _ in events] == events
        assert (await anext(few)).at == 99.0


async def test_a_listener_may_choose_senders(bench: Bench) -> None:
    sources = ("collector", "proxy.0", "learner.main", "host.gpu2", "proxy.7")
    events = {source: Event(run=bench.run, source=source, name="state", at=1.0) for source in sources}
    async with bench.broker.events(bench.run, senders=("proxy", "host")) as listener:
        for event in events.values():
            await bench.broker.emit(event)
        heard = [await anext(listener) for _ in range(3)]
    assert heard == [events["proxy.0"], events["host.gpu2"], events["proxy.7"]]


async def test_a_broker_that_takes_messages_is_not_blocked(bench: Bench) -> None:
    assert not await bench.broker.is_blocked()
    assert await bench.broker.emit(Event(run=bench.run, source="x", name="state", at=0.0))


async def test_an_event_without_listeners_harms_nobody(bench: Bench) -> None:
    await bench.broker.emit(Event(run=bench.run, source="x", name="warning", at=0.0))
    await publish_ends(bench, 1)
    await take(bench, bench.inbox, 1)


async def test_declaring_again_changes_nothing(bench: Bench) -> None:
    await publish_ends(bench, 1)
    await bench.broker.declare(bench.run, policies=["main", "judge"], kinds=["math", "code"])
    await take(bench, bench.inbox, 1)
    await bench.broker.publish(topology.tickets(bench.run, "code"), end(bench.run, 1))


async def test_depths_count_what_waits_and_leave_out_what_does_not_exist(bench: Bench) -> None:
    await publish_ends(bench, 3)
    missing = topology.ready(bench.run, "nobody")
    assert await bench.broker.depths([missing, bench.inbox, bench.tasks]) == {
        bench.inbox: Depth(ready=3, consumers=0),
        bench.tasks: Depth(ready=0, consumers=0),
    }


async def test_the_loop_ends_when_its_consumer_is_closed(bench: Bench) -> None:
    async with bench.broker.consume(bench.inbox, prefetch=1) as deliveries:
        pass
    assert await deliveries.batch(1) == []
    with pytest.raises(StopAsyncIteration):
        await anext(deliveries)


async def test_what_a_consumers_body_raises_comes_out_as_it_is(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        async with bench.broker.consume(bench.inbox, prefetch=1):
            _ = 1 / 0
