"""Workers that compete for a queue, against the real RabbitMQ."""

import asyncio
import contextlib

import msgspec
import pytest

from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.consumer import DEFAULT_ACK_S, open_consumer
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import Worker
from swarmq.messages import EpisodeBegin, EpisodeEnd, Slot, Task

pytestmark = pytest.mark.broker

BRIEF_S = 0.3
"""Stands for the twenty minutes after which a consumer of a RabbitMQ that says nothing is recycled."""


def task(run, name, *, attempt=0):
    return Task(run=run, slot=Slot(task_id=name), kind="math", group_size=1, attempt=attempt)


@contextlib.asynccontextmanager
async def working(run, function, *, number=2, ack_s=DEFAULT_ACK_S, **options):
    """So many workers, each with a client of its own; they stop at the end."""
    invite, stop = msgspec.structs.replace(run.invite, ticketed=False), asyncio.Event()

    def open_broker(invite, name):
        return AmqpBroker.open(invite.amqp_url, name=name, deadline_s=120.0, default_ack_s=ack_s)

    async def work():
        async with AsyncSwarmClient(invite, open_broker=open_broker) as client:
            await Worker(client, function, options=RunnerOptions(retry_pause_s=0.0, progress=False, **options)).run(
                stop
            )

    async with asyncio.timeout(300), asyncio.TaskGroup() as workers:
        for _ in range(number):
            workers.create_task(work())
        yield
        stop.set()


async def recycled(run, times):
    """Return when another consumer, which is recycled after BRIEF_S, has been so often."""
    queue = topology.evals(run.invite.run, "math")
    await run.broker.publish(queue, task(run.invite.run, "clock"))
    consumer = open_consumer(
        run.invite.amqp_url, queue, prefetch=1, name="clock", bury=run.broker._bury, recycle_s=BRIEF_S
    )
    async with consumer as deliveries:
        for _ in range(times + 1):
            await anext(deliveries)


async def test_no_attempt_is_begun_twice_however_long_it_takes(run_in):
    async with run_in() as run:
        gate, begun = asyncio.Event(), []

        async def agent(ep):
            begun.append(ep.task.id)
            await gate.wait()
            return 1.0

        async with working(run, agent, ack_s=1.5 * BRIEF_S, concurrency=4):
            await run.feed("a", "b", "c")
            await run.begins(3)
            await recycled(run, times=5)
            assert sorted(begun) == ["a", "b", "c"]
            gate.set()
            assert {end.status for end in await run.ends(3)} == {"finished"}
        assert sorted(begun) == ["a", "b", "c"]


async def test_a_slot_that_failed_is_the_next_to_be_attempted_although_nine_thousand_wait(run_in):
    async with run_in() as run:
        name = run.invite.run
        waiting = [f"t{number}" for number in range(9000)]
        await asyncio.gather(
            *(run.broker.publish(topology.tasks(name, "math"), task(name, one)) for one in ["late", *waiting])
        )
        mended = asyncio.Event()

        async def agent(ep):
            if ep.task.id == "late" and ep.attempt < 2:
                raise ConnectionError("no sandbox")
            if ep.task.id == "late":
                mended.set()
            return 1.0

        async with working(run, agent, concurrency=4, max_attempts=3):
            await mended.wait()
        begins, attempts = {}, []

        def enough(pieces):
            late = [one for one in pieces if isinstance(one, EpisodeBegin) and one.slot.task_id == "late"]
            return len(late) == 3

        for piece in await run.pieces(enough):
            if isinstance(piece, EpisodeBegin):
                begins[piece.episode_id] = piece
                attempts.append(piece.slot.task_id)
            elif isinstance(piece, EpisodeEnd) and piece.status == "failed" and begins[piece.episode_id].attempt == 1:
                attempts.clear()
        assert attempts[-1] == "late"
        assert len(attempts) < 20, "those that were under way, and no more of the nine thousand"
