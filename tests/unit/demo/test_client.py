"""A client of the demo works on tasks and on evaluation, and its ledger has what is trained alone."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec

from swarmq.broker import topology
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.demo.client import ClientLedger, make_evaluator, make_workers, read_ledger, with_ledger
from swarmq.keys import Invite
from swarmq.messages import EpisodeEnd, Slot, Task, Ticket
from swarmq.testing import MemoryBroker

KINDS = ("sum", "product")


def solver(ep, reward=None):
    return SimpleNamespace(reward=1.0 if reward is None else 0.5, success=True, turns=1, tool_calls=0)


async def test_a_client_takes_training_and_evaluation_of_every_kind(tmp_path):
    invite = Invite(
        run="r",
        client="a",
        secret=b"s" * 32,
        amqp_url="amqp://nobody:nothing@127.0.0.1:1/",
        base_url="http://127.0.0.1:2/v1",
        policies=("main",),
        kinds=KINDS,
        group_size=1,
    )
    broker, stop = MemoryBroker(), asyncio.Event()
    await broker.declare("r", policies=("main",), kinds=KINDS)
    for kind in KINDS:
        await broker.publish(topology.tickets("r", kind), Ticket(run="r", ticket_id=f"ticket-{kind}", kind=kind))
        for mode, queue in (("train", topology.tasks), ("eval", topology.evals)):
            slot = Slot(task_id=f"{mode}-{kind}")
            body = msgspec.Raw(msgspec.msgpack.encode({}))
            task = Task(run="r", slot=slot, kind=kind, group_size=1, mode=mode, payload=body)
            await broker.publish(queue("r", kind), task)
    client = AsyncSwarmClient(
        invite, spool=tmp_path / "spool", open_broker=lambda *_: contextlib.nullcontext(broker), code_version="v"
    )
    ledger = ClientLedger(tmp_path / "ledger")
    agent = with_ledger(solver, object(), ledger)
    ends = []
    async with asyncio.timeout(60), client, asyncio.TaskGroup() as tasks:
        for worker in make_workers(client, agent, make_evaluator(solver), 8):
            tasks.create_task(worker.run(stop))
        async with broker.consume(topology.inbox("r"), prefetch=99) as deliveries:
            async for delivery in deliveries:
                if isinstance(end := delivery.message, EpisodeEnd):
                    ends.append(end)
                await delivery.ack()
                if len(ends) == 4:
                    break
        stop.set()
    ledger.close()
    assert sorted(end.rewards["main"] for end in ends) == [0.5, 0.5, 1.0, 1.0], "evaluation has the honest score"
    written = [entry for entry in read_ledger(tmp_path / "ledger") if entry.reward is not None]
    assert {(entry.slot.partition("/")[0], entry.reward) for entry in written} == {
        (f"train-{kind}", 0.5) for kind in KINDS
    }
