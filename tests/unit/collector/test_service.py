"""The shell keeps its order: committed, then acknowledged; committed, then published; confirmed, then marked."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from support.disk import StoreOnFullDisk
from swarmq.broker import topology
from swarmq.broker.deliveries import REASON_HEADER
from swarmq.collector.decide import episodes
from swarmq.collector.decide.effects import Forward
from swarmq.collector.decide.state import TurnMeta
from swarmq.collector.service import Collector, CollectorIntervals
from swarmq.collector.store import Store
from swarmq.config import CollectorSettings, SwarmJob
from swarmq.messages import Command, Fence, Rollout, Ticket, Turn, decode
from swarmq.testing import MemoryBroker

IN, READY = topology.inbox("r"), topology.ready("r", "main")


@pytest.fixture
def job():
    tree = {
        "run": "r",
        "mix": {"math": 1.0},
        "policies": {"main": {"model": "m"}},
        "groups": {"group_size": 1, "groups_per_batch": 2, "min_group": 1, "max_staleness": 0},
    }
    return SwarmJob.build(tree)


@pytest.fixture
async def broker(job):
    broker = MemoryBroker()
    await broker.declare(job.run, policies=job.policies, kinds=job.mix)
    return broker


@contextlib.asynccontextmanager
async def collecting(job, broker, store, **intervals):
    """A collector at work; drained at the end."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Collector(job, broker, store, intervals=CollectorIntervals(**intervals)).run(stop))
        yield
        stop.set()


async def arrivals(broker, queue, num):
    """The next messages of a queue, left in it."""
    async with broker.consume(queue, prefetch=100) as deliveries:
        return [(await anext(deliveries)).message for _ in range(num)]


async def test_pieces_in_episodes_and_tickets_out(job, broker, say):
    store = Store(None, run="r")
    async with collecting(job, broker, store):
        tickets = await arrivals(broker, topology.tickets("r", "math"), 2)
        assert [ticket.ticket_id for ticket in tickets if isinstance(ticket, Ticket)] == ["math.1", "math.2"]
        for piece in (say.begin(ticket_id="math.1"), say.turn(), say.end()):
            await broker.publish(IN, piece)
        (episode,) = await arrivals(broker, READY, 1)
        assert isinstance(episode, Rollout)
        assert episode.episode_id == "e"
    assert store.outbox() == []
    assert broker.stored(IN) == []
    assert [event.fields["status"] for event in broker.emitted if event.name == "episode"] == ["finished"]
    (state,) = [event for event in broker.emitted if event.name == "state"][-1:]
    assert (state.source, state.fields["finished"], state.fields["forwarded"]) == ("collector", 1, 1)


async def test_an_end_waits_for_the_turns_that_were_recorded_before_it(job, broker, say):
    divided = msgspec.structs.replace(job, collector=CollectorSettings(processes=3))
    turn = say.turn()
    await broker.declare("r", policies=job.policies, kinds=job.mix, turn_queues=2)
    await broker.publish(topology.turns_of("r", turn.episode_id, 2), turn)
    for piece in (say.begin(), say.end()):
        await broker.publish(IN, piece)
    async with collecting(divided, broker, Store(None, run="r")):
        (episode,) = await arrivals(broker, READY, 1)
    assert [one.call_id for one in episode.turns] == [turn.call_id]
    assert not any(broker.stored(queue) for queue in (IN, *topology.list_turns("r", 2)))


async def test_turns_that_more_processes_left_behind_are_collected(job, broker, say):
    await broker.declare("r", policies=job.policies, kinds=job.mix, turn_queues=2)
    await broker.publish(topology.turns("r", 2), say.turn())
    for piece in (say.begin(), say.end()):
        await broker.publish(IN, piece)
    async with collecting(job, broker, Store(None, run="r")):
        (episode,) = await arrivals(broker, READY, 1)
    assert len(episode.turns) == 1


class LosesAFence(MemoryBroker):
    """As a broker does when a queue is deleted in that moment."""

    num_fences = 0

    async def publish(self, queue, message, *, deadline_s=None):
        self.num_fences += isinstance(message, Fence)
        if not isinstance(message, Fence) or self.num_fences > 1:
            await super().publish(queue, message, deadline_s=deadline_s)


async def test_a_fence_that_is_lost_is_sent_again(job, say):
    broker = LosesAFence()
    divided = msgspec.structs.replace(job, collector=CollectorSettings(processes=2))
    await broker.declare("r", policies=job.policies, kinds=job.mix, turn_queues=1)
    for piece in (say.begin(), say.turn(), say.end()):
        await broker.publish(topology.turns("r", 1) if isinstance(piece, Turn) else IN, piece)
    async with collecting(divided, broker, Store(None, run="r"), confirm_s=0.01):
        await arrivals(broker, READY, 1)
    assert broker.num_fences > 1


async def test_nothing_is_acknowledged_before_it_is_committed(job, broker, say):
    store = StoreOnFullDisk()
    await broker.publish(IN, say.begin())
    async with collecting(job, broker, store, retry_s=0.0):
        store.full = True
        await broker.publish(IN, say.turn())
        await broker.publish(IN, say.end())
        await store.refused.wait()
        broker.interrupt()
        assert not broker.stored(READY)
        store.full = False
        (episode,) = await arrivals(broker, READY, 1)
        assert len(episode.turns) == 1
    assert any(event.name == "warning" for event in broker.emitted)


async def test_what_was_committed_and_not_marked_is_published_again_by_the_next_collector(job, broker, say):
    store = Store(None, run="r")
    async with collecting(job, broker, store):
        for piece in (say.begin(), say.turn(), say.end()):
            await broker.publish(IN, piece)
        await arrivals(broker, READY, 1)
    with store.transaction():  # as if the mark had not been written
        store.write(Forward("e", "main", 1))
    async with collecting(job, broker, store):
        first, second = await arrivals(broker, READY, 2)
    assert first == second
    assert store.outbox() == []


async def test_pieces_of_another_run_are_parked_with_the_reason(job, broker, say):
    await broker.publish(IN, msgspec.structs.replace(say.begin(), run="other"))
    broker.put(IN, b"garbage")
    for piece in (say.begin(), say.turn(), say.end()):
        await broker.publish(IN, piece)
    async with collecting(job, broker, Store(None, run="r")):
        await arrivals(broker, READY, 1)
    reasons = [stored.headers[REASON_HEADER] for stored in broker.stored(topology.DEAD)]
    assert len(reasons) == 2
    assert any("run 'other'" in reason for reason in reasons)
    assert broker.stored(IN) == []


async def test_a_piece_that_breaks_the_core_is_parked_and_its_neighbours_are_not(job, broker, say):
    for piece in (say.begin(), say.turn(), say.begin("huge", "u", group_size=2**63)):
        await broker.publish(IN, piece)
    for piece in (say.turn(episode="huge"), say.end("huge"), say.end()):
        await broker.publish(IN, piece)
    async with collecting(job, broker, Store(None, run="r")):
        (episode,) = await arrivals(broker, READY, 1)
        assert episode.episode_id == "e"
    (parked,) = broker.stored(topology.DEAD)
    assert "the collector failed on it: OverflowError" in parked.headers[REASON_HEADER]


async def episodes_beside_a_spoilt_one(job, broker, say, spoilt):
    """Those that are forwarded when `spoilt` is a turn of `e`; and what is set aside."""
    for piece in (say.begin(), say.turn(), spoilt, say.end()):
        await broker.publish(IN, piece)
    for piece in (say.begin("f", "u"), say.turn(episode="f"), say.end("f")):
        await broker.publish(IN, piece)
    async with collecting(job, broker, Store(None, run="r")):
        await arrivals(broker, READY, 1)
    forwarded = [decode(stored.body).episode_id for stored in broker.stored(READY)]
    ended = [event.fields for event in broker.emitted if event.name == "episode"]
    assert [(one["episode_id"], one["reason"]) for one in ended] == [("e", "refused_turn"), ("f", "")]
    assert broker.stored(IN) == []
    (parked,) = broker.stored(topology.DEAD)
    return forwarded, parked.headers[REASON_HEADER]


async def test_an_episode_with_a_turn_that_cannot_be_used_is_dropped_and_the_turn_parked(job, broker, say):
    spoilt = msgspec.structs.replace(say.turn("b"), logprobs=b"\0" * 8)
    forwarded, reason = await episodes_beside_a_spoilt_one(job, broker, say, spoilt)
    assert forwarded == ["f"]
    assert reason == "turn b of e: 1 sampled tokens but 2.0 log-probabilities"


async def test_an_episode_with_a_turn_that_breaks_the_core_is_dropped(job, broker, say, monkeypatch):
    monkeypatch.setattr(episodes, "TurnMeta", _Breaks)
    forwarded, reason = await episodes_beside_a_spoilt_one(job, broker, say, say.turn("b"))
    assert forwarded == ["f"]
    assert reason == "the collector failed on it: KeyError('b')"


async def test_a_turn_whose_refusal_breaks_the_core_as_well_is_parked_alone(job, broker, say, monkeypatch):
    monkeypatch.setattr(episodes, "TurnMeta", _Breaks)
    monkeypatch.setattr(episodes, "_taint", lambda episode, _: {}[episode.episode_id])
    for piece in (say.begin(), say.turn("b"), say.begin("f", "u"), say.turn(episode="f"), say.end("f")):
        await broker.publish(IN, piece)
    async with collecting(job, broker, Store(None, run="r")):
        (episode,) = await arrivals(broker, READY, 1)
        assert episode.episode_id == "f"
    (parked,) = broker.stored(topology.DEAD)
    assert decode(parked.body) == say.turn("b")
    assert parked.headers[REASON_HEADER] == "the collector failed on it: KeyError('e')"
    assert broker.stored(IN) == []


class _Breaks(TurnMeta):
    @classmethod
    def of(cls, turn, size_bytes):
        if turn.call_id == "b":
            raise KeyError(turn.call_id)
        return TurnMeta.of(turn, size_bytes)


async def test_deleted_queues_are_made_again(job, broker, say):
    async with broker.events("r") as events, collecting(job, broker, Store(None, run="r"), check_s=0.01):
        await arrivals(broker, topology.tickets("r", "math"), 2)
        broker.delete(IN)
        broker.delete(READY)
        await anext(event async for event in events if event.name == "warning")
        for piece in (say.begin(), say.turn(), say.end()):
            await broker.publish(IN, piece)
        assert len(await arrivals(broker, READY, 1)) == 1


async def test_an_episode_that_called_no_model_is_a_warning_that_people_see(job, broker, say):
    async with collecting(job, broker, Store(None, run="r")):
        for piece in (say.begin(), say.end()):
            await broker.publish(IN, piece)
        while not (warnings := [event.fields["text"] for event in broker.emitted if event.name == "warning"]):  # noqa: ASYNC110 - the memory broker has no event
            await asyncio.sleep(0)
    [warning] = warnings
    assert "does the agent use ep.base_url and ep.api_key?" in warning


async def test_what_deleted_queues_held_is_sent_again(job, broker, say):
    tickets = topology.tickets("r", "math")
    async with broker.events("r") as events, collecting(job, broker, Store(None, run="r"), check_s=0.01):
        for piece in (say.begin(ticket_id="math.1"), say.turn(), say.end()):
            await broker.publish(IN, piece)
        (before,) = await arrivals(broker, READY, 1)
        await arrivals(broker, tickets, 1)
        broker.delete(READY)
        broker.delete(tickets)
        told = await anext(event async for event in events if event.name == "warning")
        assert READY in told.fields["text"]
        assert (await arrivals(broker, READY, 1)) == [before]
        assert [ticket.ticket_id for ticket in await arrivals(broker, tickets, 1)] == ["math.2"]
        await broker.publish(IN, say.consumed("e"))
        assert len(await arrivals(broker, tickets, 2)) == 2


async def test_queues_that_the_broker_cannot_bring_up_are_made_again_with_what_they_held(job, broker, say):
    tickets = topology.tickets("r", "math")
    async with collecting(job, broker, Store(None, run="r"), check_s=0.01, confirm_s=0.01, lost_s=0.0):
        await arrivals(broker, tickets, 2)
        broker.wreck(tickets)  # nothing is to be sent there: that its tickets are missing is found out
        broker.wreck(READY)
        for piece in (say.begin(ticket_id="math.1"), say.turn(), say.end()):
            await broker.publish(IN, piece)
        assert [episode.episode_id for episode in await arrivals(broker, READY, 1)] == ["e"]
        assert [ticket.ticket_id for ticket in await arrivals(broker, tickets, 1)] == ["math.2"]


async def test_a_queue_that_was_deleted_while_no_collector_ran_is_filled_by_the_next(job, broker, say):
    store = Store(None, run="r")
    async with collecting(job, broker, store):
        for piece in (say.begin(), say.turn(), say.end()):
            await broker.publish(IN, piece)
        before = await arrivals(broker, READY, 1)
    broker.delete(READY)
    async with collecting(job, broker, store):
        while READY not in await broker.depths([READY]):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await arrivals(broker, READY, 1) == before


async def test_tickets_that_are_in_no_queue_and_used_by_nobody_are_issued_again(job, broker):
    tickets = topology.tickets("r", "math")
    async with collecting(job, broker, Store(None, run="r"), check_s=0.01, lost_s=0.0):
        await arrivals(broker, tickets, 2)
        broker.purge(tickets)
        assert [ticket.ticket_id for ticket in await arrivals(broker, tickets, 2)] == ["math.1", "math.2"]


async def test_a_learner_that_asks_gets_what_it_has_not_reported_once_more(job, broker, say):
    async with collecting(job, broker, Store(None, run="r")):
        for name in ("a", "b"):
            for piece in (say.begin(name, name), say.turn(episode=name), say.end(name)):
                await broker.publish(IN, piece)
        _, second = await arrivals(broker, READY, 2)
        await broker.publish(IN, say.consumed("a"))
        broker.purge(READY)
        await broker.publish(IN, say.consumed())
        assert await arrivals(broker, READY, 1) == [second]


async def test_a_learner_that_lost_its_control_state_hears_it_again_when_the_collector_starts(job, broker):
    store, control = Store(None, run="r"), topology.control("r", "main")
    async with collecting(job, broker, store):
        await broker.publish(topology.control("r"), Command(run="r", command_id="c", action="pause"))
        (first,) = await arrivals(broker, control, 1)
    broker.purge(control)  # the learner has read it, and its file was lost
    async with collecting(job, broker, store):
        assert await arrivals(broker, control, 1) == [first]
    assert (first.pace, first.number) == ("paused", 1)
