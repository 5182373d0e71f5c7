"""What the proxy's answers leave in the queue, read by a collector: trained is what the agent received, and nothing else."""

import asyncio
import socket

import pytest

from swarmq.broker import topology
from swarmq.errors import UnconfirmedError
from swarmq.messages import DeliveryReport, EpisodeBegin, EpisodeEnd, Slot, Turn, decode
from swarmq.testing import MemoryBroker
from unit.collector.conftest import Bench, rules

HI = {"role": "user", "content": "hi"}
BODY = {"model": "main", "messages": [HI]}
INBOX = topology.inbox("r")


class LateBroker(MemoryBroker):
    """Takes turns, and while `is_late` confirms them when nobody waits any more: as RabbitMQ does under an alarm."""

    is_late = True

    def __init__(self):
        super().__init__()
        self.took = asyncio.Event()

    async def publish(self, queue, message, *, deadline_s=None):
        await super().publish(queue, message, deadline_s=deadline_s)
        if isinstance(message, Turn) and self.is_late:
            self.took.set()
            await asyncio.sleep(deadline_s)
            raise UnconfirmedError("not confirmed in time")


class Reader:
    """A collector that reads what is in the inbox."""

    def __init__(self, stage):
        self.stage, self.bench = stage, Bench(rules(known=("main", "other")))
        slot = Slot(task_id="t")
        self.bench.take(
            EpisodeBegin(
                run="r", episode_id="e1", slot=slot, kind="math", group_size=1, policies=("main",), client_id="c"
            )
        )

    async def wait_for_report(self):
        """Return when the proxy has reported on an answer; the agent may be faster."""
        async with self.stage.broker.consume(INBOX, prefetch=1000) as deliveries:
            async for delivery in deliveries:
                if isinstance(delivery.message, DeliveryReport):
                    return

    def end(self):
        self.read()
        self.bench.take(EpisodeEnd(run="r", episode_id="e1", status="finished", rewards={"main": 1.0}))

    def read(self):
        self.bench.take(*[decode(stored.body) for stored in self.stage.broker.stored(INBOX)])
        self.stage.broker.purge(INBOX)

    @property
    def trained(self):
        return [turn.call_id for episode in self.bench.episodes for turn in episode.turns]


async def test_an_answer_that_was_received_is_trained(stage):
    reader = Reader(stage)
    stage.engine.say("x")
    answer = await stage.ask(HI)
    reader.end()
    await reader.wait_for_report()
    reader.read()
    assert reader.trained == [answer["id"]]


async def test_a_stream_that_was_received_is_trained(stage):
    reader = Reader(stage)
    stage.engine.say("ab")
    first, *_ = await stage.stream(HI)
    reader.end()
    await reader.wait_for_report()
    reader.read()
    assert reader.trained == [first["id"]]


async def test_an_agent_that_hangs_up_after_its_answer_has_received_it(stage):
    reader = Reader(stage)
    stage.engine.say("x")
    status, _, _ = await stage.post(BODY, headers={"connection": "close"})
    reader.end()
    await reader.wait_for_report()
    reader.read()
    assert status == 200
    assert len(reader.trained) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ended", ["before the proxy has said so", "after it"])
async def test_an_answer_that_was_refused_because_its_confirm_was_late_is_not_trained(stages, stream, ended):
    async with stages(confirm_timeout_s=0.05, broker=LateBroker()) as stage:
        reader = Reader(stage)
        stage.engine.say("x")
        _, _, raw = await stage.post({**BODY, "stream": stream})
        assert b"broker_unavailable" in raw
        assert len(stage.turns()) == 1
        if ended == "after it":
            await reader.wait_for_report()
        reader.end()
        if ended != "after it":
            await reader.wait_for_report()
            reader.read()
        assert reader.trained == []
        assert reader.bench.dropped == {"unseen": 1}


async def test_all_choices_of_a_refused_answer_are_left_out(stages):
    async with stages(confirm_timeout_s=0.05, broker=(broker := LateBroker())) as stage:
        reader = Reader(stage)
        broker.is_late = False
        stage.engine.say("x")
        first = await stage.ask(HI)
        await reader.wait_for_report()
        broker.is_late = True
        stage.engine.say("a")
        stage.engine.say("b")
        status, _, _ = await stage.post({**BODY, "n": 2})
        assert status == 503
        reader.end()
        await reader.wait_for_report()
        reader.read()
        assert reader.trained == [first["id"]]


async def test_an_answer_whose_agent_hung_up_before_the_confirm_is_not_trained(stages):
    async with stages(confirm_timeout_s=60.0, broker=(broker := LateBroker())) as stage:
        reader = Reader(stage)
        stage.engine.say("x")
        asking = asyncio.create_task(stage.post(BODY))
        await broker.took.wait()
        asking.cancel()
        await asyncio.wait([asking])
        reader.end()
        await reader.wait_for_report()
        reader.read()
        assert reader.bench.dropped == {"unseen": 1}


async def test_an_answer_that_its_agent_does_not_read_is_not_trained(stages):
    async with stages() as stage:
        reader = Reader(stage)
        stage.engine.say("x" * 4_000_000)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stage.key()}\r\n"
        body = b'{"model": "main", "messages": [{"role": "user", "content": "hi"}]}'
        host, port = stage.url.removeprefix("http://").split(":")
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect((host, int(port)))
            wire.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.to_thread(wire.recv, 100)
            reader.end()
        await reader.wait_for_report()
        reader.read()
        assert reader.bench.dropped == {"unseen": 1}


async def test_what_is_not_told_when_the_proxy_stops_is_told_first(stages):
    broker = MemoryBroker()
    async with stages(broker=broker) as stage:
        stage.engine.say("x")
        await stage.ask(HI)
    assert any(isinstance(decode(stored.body), DeliveryReport) for stored in broker.stored(INBOX))


async def test_a_library_that_counts_its_retries_says_what_is_none(stage):
    for headers in ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "2"}, {}):
        stage.engine.say("x")
        await stage.ask(HI, headers=headers)
    assert [(turn.counts_retries, turn.retry) for turn in stage.turns()] == [(True, 0), (True, 2), (False, 0)]


async def test_the_proxy_speaks_of_no_answer_in_an_evaluation(stage):
    stage.engine.say("x")
    await stage.ask(HI, key=stage.key(mode="eval"))
    [turn] = stage.turns()
    assert not turn.receipt
