"""Which function works on which kind, in which lanes, and what cannot be given to other processes."""

import asyncio
import contextlib

import msgspec
import pytest
from structlog.testing import capture_logs

from swarmq.broker import topology
from swarmq.client.episodes.client import EpisodeClient
from swarmq.client.episodes.event_loops import LoopThread
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker_processes import (
    keep_serving,
    parse_targets,
    run_processes,
    run_workers,
    work_on_kinds,
)
from swarmq.errors import EpisodeError, TaskError
from swarmq.messages import Slot, Task


def test_one_function_works_on_the_kinds_that_are_named():
    assert parse_targets(["agent:attempt"], []) == {None: "agent:attempt"}
    assert parse_targets(["agent:attempt"], ["math", "code"]) == {"math": "agent:attempt", "code": "agent:attempt"}


def test_every_kind_may_have_its_own():
    assert parse_targets(["math=a:f", "code=b:g"], []) == {"math": "a:f", "code": "b:g"}


@pytest.mark.parametrize(
    ("texts", "kinds", "says"),
    [
        (["a:f", "b:g"], [], "say which kind each is for, e.g. math=a:f code=b:g"),
        (["math=a:f", "b:g"], [], "kind=module:function for every kind"),
        (["math=a:f"], ["math"], "kind=module:function for every kind"),
        (["math=a:f", "math=b:g"], [], "kind 'math' has a function already"),
    ],
)
def test_what_is_unclear_is_refused(texts, kinds, says):
    with pytest.raises(TaskError, match=says):
        parse_targets(texts, kinds)


def test_a_function_that_other_processes_cannot_have_is_refused_before_any_starts(make_invite):
    with pytest.raises(TaskError, match=r"<lambda> cannot be given to other processes .*: define it at the top"):
        run_processes(make_invite(), {None: lambda _ep: 1.0}, 2)
    with pytest.raises(TaskError, match="there is no module 'no_such_module'"):
        run_processes(make_invite(), {None: "no_such_module:attempt"}, 2)
    with pytest.raises(TaskError, match="is not a function"):
        run_processes(make_invite(), {None: 3}, 2)
    with pytest.raises(EpisodeError, match="kind 'nope' is not part of the run: the run's kinds are "):
        run_processes(make_invite(), {"nope": "no_such_module:attempt"}, 2)


def task(number, mode):
    slot = Slot(task_id=f"math:{mode}-{number}")
    return Task(run="r1", slot=slot, kind="math", group_size=1, mode=mode, payload=msgspec.Raw(b"\xc0"))


async def fill(broker, count):
    for number in range(count):
        await broker.publish(topology.tasks("r1", "math"), task(number, "train"))
        await broker.publish(topology.evals("r1", "math"), task(number, "eval"))


async def ended(swarm, count):
    while len(swarm.ends) < count:  # noqa: ASYNC110 - the memory broker has no event for it
        await asyncio.sleep(0)


@pytest.mark.parametrize(("busy", "free"), [("train", "eval"), ("eval", "train")])
async def test_neither_training_nor_evaluation_keeps_the_other_waiting(swarm, busy, free):
    """One of them fills all its lanes with attempts that do not end; all of the other is attempted meanwhile."""
    stop, gate, begun, done = asyncio.Event(), asyncio.Event(), [], asyncio.Event()

    async def agent(ep):
        begun.append((ep.mode, ep.task.id))
        if ep.mode == busy:
            await gate.wait()
        elif [mode for mode, _ in begun].count(free) == 20:
            done.set()
        return 1.0

    await fill(swarm.broker, 20)
    async with swarm.client() as client, asyncio.TaskGroup() as tasks:
        working = tasks.create_task(
            work_on_kinds(client, {"math": agent}, RunnerOptions(concurrency=8, progress=False), stop)
        )
        await done.wait()
        lanes = {"train": 8, "eval": 2}
        assert [mode for mode, _ in begun].count(busy) == lanes[busy], (
            "one lane in four, and no more, is for evaluation"
        )
        gate.set()
        await ended(swarm, 40)
        stop.set()
        summaries = await working
    assert (summaries["math"].finished, len(begun), len(set(begun))) == (20, 40, 40)
    tickets = {begin.mode: begin.ticket_id for begin in swarm.begins}
    assert tickets["train"] is not None
    assert tickets["eval"] is None, "evaluation needs no ticket"
    assert swarm.arrived(topology.tasks("r1", "math")) == swarm.arrived(topology.evals("r1", "math")) == []


async def test_a_worker_without_tickets_still_evaluates(swarm_of):
    swarm, stop = await swarm_of(), asyncio.Event()
    await fill(swarm.broker, 3)
    async with swarm.client() as client, asyncio.TaskGroup() as tasks:
        with capture_logs() as told:
            working = tasks.create_task(
                work_on_kinds(client, {None: lambda _ep: 1.0}, RunnerOptions(progress=False), stop)
            )
            await ended(swarm, 3)
            stop.set()
            await working
    ready = [(one["mode"], one["concurrency"]) for one in told if one["event"] == "worker_ready"]
    assert ready == [("train", 16), ("eval", 4)], "which of the two is for evaluation"
    assert {begin.mode for begin in swarm.begins} == {"eval"}
    assert len(swarm.arrived(topology.tasks("r1", "math"))) == 3, "back on the queue"


class Served:
    text = "served"

    def __init__(self, fails=""):
        self.fails = fails
        self.seen = []

    async def __call__(self, _ep):
        return 1.0

    @contextlib.asynccontextmanager
    async def serving(self):
        if self.fails:
            raise TaskError(self.fails)
        self.seen.append(asyncio.current_task())
        yield
        self.seen.append(asyncio.current_task())


async def test_what_an_agent_needs_runs_on_its_loop_and_is_left_by_the_task_that_entered_it():
    loop, agent = LoopThread("test"), Served()
    try:
        async with keep_serving(loop, [agent, agent, len]):
            [task] = agent.seen
            assert task.get_loop() is loop.loop
        assert agent.seen == [task, task]
    finally:
        loop.close()


def test_what_cannot_start_is_an_error_before_the_client_connects(make_invite):
    client = EpisodeClient(make_invite(), open_broker=None)
    with pytest.raises(TaskError, match="no tool server"):
        run_workers(client, {"math": Served(fails="no tool server")})
