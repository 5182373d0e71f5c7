"""A group and an evaluation round with hopeless slots, a worker and a collector that is killed, on a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from array import array

import msgspec
import pytest

from support.collector_process import collector, make_job
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import Worker
from swarmq.collector.ledger import read_fates
from swarmq.keys import Invite
from swarmq.messages import Command, Evaluation, Rollout, Slot, StepReport, Task, Turn
from swarmq.outcome import Outcome

pytestmark = pytest.mark.broker

SIZE, HOPELESS = 4, 3


@pytest.fixture
def job(tmp_path, run_name, amqp_url, monkeypatch):
    monkeypatch.setenv(BROKER_ANSWERED_ENV, "1")  # a slow broker is waited for
    return make_job(tmp_path, run_name, amqp_url, group_size=SIZE, groups_per_batch=1)


@contextlib.asynccontextmanager
async def worker(job, agent, mode="train"):
    """Attempts tasks until the block is left; one of them in vain."""
    invite = Invite(
        run=job.run,
        client="alice",
        secret=b"s" * 32,
        amqp_url=job.broker.url,
        base_url="http://127.0.0.1:1/v1",
        policies=("main",),
        kinds=("math",),
        group_size=SIZE,
    )
    stop = asyncio.Event()
    async with AsyncSwarmClient(invite, spool=job.run_folder.path / "spool") as client:
        options = RunnerOptions(retry_pause_s=0.0, progress=False)
        working = asyncio.ensure_future(Worker(client, agent, mode=mode, options=options).run(stop))
        yield
        stop.set()
        assert (await working).given_up == 1


async def test_a_group_with_a_hopeless_slot_is_trained_long_before_its_deadline(job):
    assert job.groups.deadline_s == 600
    go_on = asyncio.Event()
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker, asyncio.timeout(300):
        await broker.declare(job.run, policies=job.policies, kinds=job.mix)

        async def agent(ep):
            if ep.slot.repeat == HOPELESS:
                raise ConnectionError("no sandbox for this one")
            await go_on.wait()
            await broker.publish(topology.inbox(job.run), turn(job.run, ep.episode_id))
            return 1.0

        for repeat in range(SIZE):
            task = Task(run=job.run, slot=Slot(task_id="t", repeat=repeat), kind="math", group_size=SIZE)
            await broker.publish(topology.tasks(job.run, "math"), task)
        async with worker(job, agent):
            async with broker.events(job.run) as events, collector(job):
                await wait_for_event(events, lambda fields: fields["absorbed"].get("slot_given_up"))
            async with broker.events(job.run) as events, collector(job):  # the first one was killed
                go_on.set()
                async with broker.consume(topology.ready(job.run, "main"), prefetch=SIZE) as deliveries:
                    group = [(await anext(deliveries)).message for _ in range(SIZE - 1)]
                names = tuple(one.episode_id for one in group if isinstance(one, Rollout))
                assert {one.group_members for one in group} == {SIZE - 1}
                report = StepReport(run=job.run, policy="main", record=1, version=1, trained=names)
                await broker.publish(topology.inbox(job.run), report)
                await wait_for_event(events, lambda fields: fields["trained"] == SIZE - 1)
    told = [(fate.slot, fate.state) for fate in read_fates(job.run_folder.inbox).values()]
    assert (
        sorted(told) == [("t/0/0", "trained"), ("t/1/0", "trained"), ("t/2/0", "trained")] + [("t/3/0", "dropped")] * 3
    )


async def test_a_round_with_hopeless_attempts_is_closed_long_before_its_deadline(job):
    assert job.eval.deadline_s == 1800
    go_on = asyncio.Event()
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker, asyncio.timeout(300):
        await broker.declare(job.run, policies=job.policies, kinds=job.mix)

        async def agent(ep):
            if ep.task.id == "hopeless":
                raise ConnectionError("no sandbox for this one")
            await go_on.wait()
            return Outcome(1.0, metrics={"tool calls": 3})

        for name, payload in [("good", b"\xa2ok"), ("hopeless", b"\xa2ok"), ("unreadable", b"\xa1\xff")]:
            task = Task(run=job.run, slot=Slot(task_id=name), kind="math", group_size=1, mode="eval")
            await broker.publish(topology.control(job.run), msgspec.structs.replace(task, payload=msgspec.Raw(payload)))
        begin = Command(run=job.run, command_id="c", action="set", settings={"eval.every": 1000})
        await broker.publish(topology.control(job.run), begin)  # behind the tasks: the round has all of them
        async with worker(job, agent, mode="eval"):
            async with broker.events(job.run) as events, collector(job):
                await wait_for_event(events, lambda fields: fields["absorbed"].get("eval_given_up") == 2)
            async with broker.events(job.run) as events, collector(job):  # the first one was killed
                go_on.set()
                told = await wait_for_event(events, lambda _: True, name="evaluated")
                async with broker.consume(topology.control(job.run, "main"), prefetch=9) as deliveries:
                    async for delivery in deliveries:
                        if isinstance(results := delivery.message, Evaluation):
                            break
    assert (told["version"], told["missing"], told["given_up"]) == (0, 0, 2)
    assert (told["kinds"]["math"]["episodes"], told["kinds"]["math"]["reward"]) == (1, 1.0)
    assert told["kinds"]["math"]["metrics"] == {"tool calls": 3.0}
    assert (results.version, results.results) == (0, told), "for the learner's trackers"


async def wait_for_event(events, wanted, *, name="state"):
    """Return the fields of the collector's next event of this name that are `wanted`."""
    async for event in events:
        if event.name == name and wanted(event.fields):
            return event.fields
    raise AssertionError("the events ended")


def turn(run, episode_id):
    return Turn(
        run=run,
        episode_id=episode_id,
        policy="main",
        call_id="c",
        request_id="c",
        prompt_ids=array("i", range(4)).tobytes(),
        sampled_ids=array("i", range(4)).tobytes(),
        logprobs=array("f", [-1.0] * 4).tobytes(),
    )
