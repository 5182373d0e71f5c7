"""A worker on an environment that breaks: its attempts fail with a reason, are made again, and are never a reward."""

import asyncio
from collections import Counter

import msgspec
import pytest
from structlog.testing import capture_logs

from support.scripted_model import scripted_model
from swarmq.broker import topology
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import Worker
from swarmq.environments import load_agent
from swarmq.messages import Slot, Task

gymnasium = pytest.importorskip("gymnasium")
TASKS, LANES = 30, 4


class Sandbox(gymnasium.Env):
    """A game of one step. `works(seed, attempt)`: whether its sandbox holds; `attempts`: at each seed, so far."""

    observation_space = action_space = gymnasium.spaces.Text(8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.holds = self.works(seed, self.attempts[seed])
        self.attempts[seed] += 1
        return "go", {}

    def step(self, _action):
        if not self.holds:
            raise OSError("the sandbox is gone")
        return "done", 1.0, True, False, {}


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register("Sandbox-v0", entry_point=Sandbox)
    yield
    gymnasium.registry.pop("Sandbox-v0")


async def work(swarm_of, works, *, tasks):
    """Return the ends of a worker that was stopped when every task was settled, and the names of what it logged."""
    Sandbox.works, Sandbox.attempts = staticmethod(works), Counter()
    options = RunnerOptions(concurrency=LANES, max_attempts=4, retry_pause_s=0.0, progress=False)
    stop = asyncio.Event()
    with scripted_model(*["step"] * 1000) as model, capture_logs() as said:
        swarm = await swarm_of(base_url=model.url)
        await swarm.issue(1000)
        agent = load_agent(f"gymnasium:Sandbox-v0?tasks={tasks}")
        for task in agent.environment.tasks("train"):
            body = msgspec.Raw(msgspec.msgpack.encode(task))
            fed = Task(run="r1", slot=Slot(task_id=task["id"]), kind="math", group_size=1, payload=body)
            await swarm.broker.publish(topology.tasks("r1", "math"), fed)
        async with swarm.client() as client, asyncio.TaskGroup() as working:
            working.create_task(Worker(client, agent, options=options).run(stop))
            while sum(end.status == "finished" or end.final for end in swarm.ends) < tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)
            stop.set()
    return swarm.ends, [line["event"] for line in said]


async def test_attempts_that_break_half_of_the_time_are_made_again_and_hold_nothing_up(swarm_of):
    ends, said = await work(swarm_of, lambda seed, attempt: (seed + attempt) % 2, tasks=TASKS)
    finished, failed = ([end for end in ends if end.status == status] for status in ("finished", "failed"))
    assert (len(finished), len(failed), len(ends)) == (TASKS, TASKS // 2, TASKS + TASKS // 2)
    assert {end.rewards["main"] for end in finished} == {1.0}
    assert not any(end.rewards or end.metrics for end in failed)
    assert all(end.reason.endswith("OSError: the sandbox is gone\n") for end in failed)
    assert "attempts_keep_failing" not in said


async def test_a_worker_whose_attempts_all_break_pauses_and_rewards_none(swarm_of):
    ends, said = await work(swarm_of, lambda *_: False, tasks=4)
    assert [end.status for end in ends] == ["failed"] * 16, "four tasks, four attempts each"
    assert not any(end.rewards for end in ends)
    assert said.count("attempts_keep_failing") == 1
