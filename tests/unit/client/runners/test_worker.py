"""Tasks from a queue: held until their end is confirmed, whatever happens meanwhile."""

import asyncio
import contextlib
import random
import sys
import threading

import msgspec
import pytest
from structlog.testing import capture_logs

from swarmq.broker import topology
from swarmq.client.episodes.client import LIMITS, ClientLimits
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import Worker, load_target
from swarmq.errors import EpisodeError, TaskError
from swarmq.messages import Slot, Task, Ticket, decode

RUN = "r1"
TASKS = topology.tasks(RUN, "math")
AGAIN = topology.retries(RUN, "math")


def task(name, *, attempt=0, payload=None, kind="math"):
    body = msgspec.msgpack.encode(payload or {"question": name})
    return Task(run=RUN, slot=Slot(task_id=name), kind=kind, group_size=1, attempt=attempt, payload=msgspec.Raw(body))


class Working:
    """A worker that runs in the background of a test."""

    def __init__(self, swarm, client, function, *, kind=None, mode="train", **options):
        self.swarm = swarm
        self.stop = asyncio.Event()
        options = RunnerOptions(retry_pause_s=0.0, progress=False, **options)
        self.worker = Worker(client, function, kind=kind, mode=mode, options=options)
        self.running = asyncio.ensure_future(self.worker.run(self.stop))

    async def until(self, condition):
        while not condition():
            if self.running.done():
                self.running.result()
            await asyncio.sleep(0)

    async def drained(self):
        self.stop.set()
        return await self.running


@contextlib.asynccontextmanager
async def working(swarm, function, *, limits=LIMITS, **options):
    async with swarm.client(limits=limits) as client:
        worker = Working(swarm, client, function, **options)
        try:
            yield worker
        finally:
            if not worker.running.done():
                worker.running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await worker.running


async def test_a_task_is_attempted_with_its_payload_and_then_gone(swarm):
    seen = []

    async def agent(ep):
        seen.append((ep.task.id, ep.payload, ep.slot, ep.kind))
        return 0.5

    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent) as worker:
        await worker.until(lambda: swarm.ends)
        summary = await worker.drained()
    assert seen == [("a", {"question": "a"}, Slot(task_id="a"), "math")]
    assert [end.rewards for end in swarm.ends] == [{"main": 0.5}]
    assert swarm.arrived(TASKS) == []
    assert (summary.finished, summary.slots, summary.given_up) == (1, 1, 0)


async def test_an_agent_that_ignores_its_url_is_told_once_what_to_set(swarm):
    async def agent(ep):
        assert ep.api_key  # and asks whatever its library asks by default
        return 0.5

    for name in ("a", "b"):
        await swarm.broker.publish(TASKS, task(name))
    with capture_logs() as told:
        async with working(swarm, agent) as worker:
            await worker.until(lambda: len(swarm.ends) == 2)
            await worker.drained()
    [line] = [line for line in told if line["log_level"] == "warning"]
    assert (line["event"], line["kind"]) == ("episode_without_a_model_call", "math")
    assert line["seen"] == "the agent did not read ep.base_url"
    assert "base_url=ep.base_url (http" in line["action"]


async def test_a_task_is_held_until_its_end_is_confirmed(swarm):
    answered = asyncio.Event()

    async def agent(ep):
        answered.set()
        return 1.0

    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent, limits=ClientLimits(drain_s=0.0, abort_timeout_s=0.0)) as worker:
        real = swarm.broker.publish
        swarm.broker.publish = _only_begins(real)
        await answered.wait()
        await worker.until(lambda: swarm.spooled)
    swarm.broker.publish = real
    assert [message.slot.task_id for message in swarm.arrived(TASKS)] == ["a"]


def _only_begins(real):
    async def publish(queue, message, *, deadline_s=None):
        from swarmq.messages import EpisodeEnd

        if isinstance(message, EpisodeEnd) and message.status == "finished":
            await asyncio.Event().wait()
        await real(queue, message, deadline_s=deadline_s)

    return publish


async def test_tasks_stay_in_their_lanes_where_nine_attempts_in_ten_fail(swarm):
    """Otherwise each lane takes a new task after two failures, more and more groups are open, and none becomes complete."""
    dice, enough = random.Random(0), asyncio.Event()
    begun, unfinished = set(), []

    async def agent(ep):
        begun.add(ep.task.id)
        if dice.random() < 0.9:
            raise ConnectionError("no sandbox")
        unfinished.append(len(begun) - len(unfinished) - 1)
        if len(unfinished) == 60:
            enough.set()
        return 1.0

    for number in range(300):
        await swarm.broker.publish(TASKS, task(f"t{number}"))
    async with working(swarm, agent, concurrency=4, max_attempts=1000) as worker:
        await enough.wait()
        await worker.drained()
    assert unfinished[-1] < 40, unfinished


async def test_a_task_that_fails_is_attempted_again_before_those_that_wait(swarm):
    async def agent(ep):
        if ep.task.id == "a":
            raise ConnectionError("no sandbox")
        return 1.0

    for name in ["a", *map(str, range(50))]:
        await swarm.broker.publish(TASKS, task(name))
    async with working(swarm, agent, concurrency=1, max_attempts=3) as worker:
        await worker.until(lambda: len(swarm.ends) == 53)
        summary = await worker.drained()
    tried = [(begin.slot.task_id, begin.attempt) for begin in swarm.begins]
    assert tried[:2] == [("a", 0), ("a", 1)], "here, at once"
    assert ("a", 2) in tried[2:5], "by whoever takes it, before the others"
    assert swarm.arrived(TASKS) == swarm.arrived(AGAIN) == []
    assert (summary.finished, summary.failed, summary.given_up, summary.slots) == (50, 3, 1, 51)


async def test_a_task_that_is_given_back_to_a_run_without_a_queue_for_it_is_attempted_after_the_others(swarm):
    """Such a run was begun by an older version."""

    async def agent(ep):
        if ep.task.id == "a":
            raise ConnectionError("no sandbox")
        return 1.0

    swarm.broker.delete(AGAIN)
    for name in "ab":
        await swarm.broker.publish(TASKS, task(name))
    async with working(swarm, agent, concurrency=1, max_attempts=3) as worker:
        await worker.until(lambda: len(swarm.ends) == 4)
        await worker.drained()
    tried = [(begin.slot.task_id, begin.attempt) for begin in swarm.begins]
    assert tried == [("a", 0), ("a", 1), ("b", 0), ("a", 2)]


async def test_a_further_attempt_has_the_first_ticket(swarm_of):
    swarm = await swarm_of()
    gate = asyncio.Event()

    async def agent(ep):
        if ep.task.id == "a":
            await gate.wait()
            raise ConnectionError("no sandbox")
        return 1.0

    await swarm.issue(1)
    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent, concurrency=3) as worker:
        await worker.until(lambda: swarm.begins)
        for name in "bcd":
            await swarm.broker.publish(TASKS, task(name))
        waiting = worker.worker._client._transport._ticket_sources["math"]._waiting
        await worker.until(lambda: len(waiting) == 2)
        gate.set()
        await worker.until(lambda: len(waiting) == 3)
        await swarm.issue(1)
        await worker.until(lambda: len(swarm.begins) == 2)
    assert [(begin.slot.task_id, begin.attempt) for begin in swarm.begins] == [("a", 0), ("a", 1)]


async def test_a_worker_that_is_told_to_stop_begins_no_further_attempt(swarm):
    async def agent(ep):
        worker.stop.set()
        raise ConnectionError("no sandbox")

    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent) as worker:
        await worker.running
    assert [begin.attempt for begin in swarm.begins] == [0]
    assert [end.final for end in swarm.ends] == [False]
    assert [message.attempt for message in swarm.arrived(AGAIN)] == [1]


async def test_a_worker_that_is_told_to_stop_gives_up_a_task_whose_last_attempt_fails(swarm):
    async def agent(ep):
        worker.stop.set()
        raise ConnectionError("no sandbox")

    await swarm.broker.publish(TASKS, task("a", attempt=2))
    async with working(swarm, agent, max_attempts=3) as worker:
        summary = await worker.running
    assert [end.final for end in swarm.ends] == [True]
    assert swarm.arrived(TASKS) == []
    assert summary.given_up == 1


async def test_a_worker_that_is_killed_at_a_last_attempt_gives_nothing_up(swarm):
    begun = asyncio.Event()

    async def agent(ep):
        begun.set()
        await asyncio.Event().wait()

    await swarm.broker.publish(TASKS, task("a", attempt=2))
    async with working(swarm, agent, max_attempts=3):
        await begun.wait()
    assert [(end.status, end.final) for end in swarm.ends] == [("aborted", False)]
    assert [message.attempt for message in swarm.arrived(TASKS)] == [2]


async def test_a_failing_task_goes_back_as_a_further_attempt_until_they_are_used_up(swarm, capsys):
    def agent(ep):
        raise ConnectionError("no sandbox")

    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent, max_attempts=3) as worker:
        await worker.until(lambda: len(swarm.ends) == 3)
        summary = await worker.drained()
    assert [begin.attempt for begin in swarm.begins] == [0, 1, 2]
    assert {begin.slot for begin in swarm.begins} == {Slot(task_id="a")}
    assert {end.status for end in swarm.ends} == {"failed"}
    assert [end.final for end in swarm.ends] == [False, False, True]
    assert swarm.arrived(TASKS) == []
    assert (summary.failed, summary.given_up, summary.slots) == (3, 1, 1)
    assert capsys.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_task_whose_agent_hangs_goes_on_as_a_further_attempt(swarm, threaded, capsys, impatient):
    impatient(lambda ep: ep.attempt == 0)
    forever = threading.Event()

    async def coroutine(ep):
        await asyncio.Event().wait() if ep.attempt == 0 else None
        return 1.0

    def ordinary(ep):
        forever.wait() if ep.attempt == 0 else None
        return 1.0

    await swarm.broker.publish(TASKS, task("a"))
    try:
        async with working(swarm, ordinary if threaded else coroutine, concurrency=1) as worker:
            await worker.until(lambda: len(swarm.ends) == 2)
            await worker.drained()
    finally:
        forever.set()
    assert [(end.status, end.rewards) for end in swarm.ends] == [("failed", {}), ("finished", {"main": 1.0})]
    assert swarm.arrived(TASKS) == []


async def test_no_more_than_concurrency_tasks_are_held(swarm):
    gate, busy = asyncio.Event(), []

    async def agent(ep):
        busy.append(ep.task.id)
        await gate.wait()
        return 1.0

    for number in range(5):
        await swarm.broker.publish(TASKS, task(str(number)))
    async with working(swarm, agent, concurrency=2) as worker:
        await worker.until(lambda: len(busy) == 2)
        assert len(swarm.broker.stored(TASKS)) == 3
        gate.set()
        await worker.until(lambda: len(swarm.ends) == 5)


async def test_a_task_that_comes_again_after_a_lost_session_is_not_attempted_twice(swarm):
    gate, calls = asyncio.Event(), []

    async def agent(ep):
        calls.append(ep.episode_id)
        await gate.wait()
        return 1.0

    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent) as worker:
        await worker.until(lambda: calls)
        for _ in range(3):
            swarm.broker.interrupt()
            await asyncio.sleep(0)
        gate.set()
        await worker.until(lambda: swarm.ends)
        await worker.drained()
    assert len(calls) == 1
    assert swarm.arrived(TASKS) == []


async def test_a_task_whose_acknowledgement_was_lost_is_acknowledged_when_it_comes_again(swarm):
    calls = []

    async def agent(ep):
        calls.append(ep.task.id)
        return 1.0

    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent) as worker:
        await worker.until(lambda: worker.worker._tally.finished)
        await swarm.broker.publish(TASKS, task("a"))  # as if the broker had never seen the acknowledgement
        await swarm.broker.publish(TASKS, task("b"))
        await worker.until(lambda: len(swarm.ends) == 2)
        await worker.drained()
    assert calls == ["a", "b"]


async def test_a_killed_workers_task_goes_to_another(swarm):
    attempts = []

    async def agent(ep):
        attempts.append(ep.episode_id)
        if len(attempts) == 1:
            await asyncio.Event().wait()
        return 1.0

    await swarm.broker.publish(TASKS, task("a"))
    async with working(swarm, agent) as first:
        await first.until(lambda: attempts)
    async with working(swarm, agent) as second:
        await second.until(lambda: [end for end in swarm.ends if end.status == "finished"])
        await second.drained()
    assert len(attempts) == 2
    assert swarm.arrived(TASKS) == []


async def test_draining_finishes_what_has_begun_and_gives_back_what_has_not(swarm_of):
    swarm = await swarm_of()
    await swarm.issue(1)
    gate, begun = asyncio.Event(), []

    async def agent(ep):
        begun.append(ep.task.id)
        await gate.wait()
        return 1.0

    for name in ("a", "b"):
        await swarm.broker.publish(TASKS, task(name))
    async with working(swarm, agent) as worker:
        await worker.until(lambda: begun)  # the other waits for a ticket
        draining = asyncio.ensure_future(worker.drained())
        await asyncio.sleep(0)
        await swarm.broker.publish(TASKS, task("c"))
        gate.set()
        summary = await draining
    assert summary.finished == 1
    assert sorted(message.slot.task_id for message in swarm.arrived(TASKS)) == sorted({"a", "b", "c"} - set(begun))


async def test_what_is_no_task_is_parked_with_its_reason(swarm):
    await swarm.broker.publish(TASKS, Ticket(run=RUN, ticket_id="x", kind="math"))
    await swarm.broker.publish(TASKS, task("a", kind="chess"))
    await swarm.broker.publish(TASKS, task("b"))
    async with working(swarm, lambda ep: 1.0) as worker:
        await worker.until(lambda: worker.worker._tally.finished and len(swarm.broker.stored(topology.DEAD)) == 2)
        await worker.drained()
    reasons = [stored.headers["x-sq-reason"] for stored in swarm.broker.stored(topology.DEAD)]
    assert reasons[0] == "Ticket on a task queue"
    assert "kind 'chess' is not part of the run" in reasons[1]
    assert [(end.status, end.final) for end in swarm.ends] == [("failed", True), ("finished", False)]


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_a_task_that_cannot_be_attempted_is_given_up_before_it_is_parked(swarm_of, mode):
    swarm = await swarm_of()  # without a ticket
    broken = msgspec.structs.replace(task("a", attempt=1), mode=mode, payload=msgspec.Raw(b"\xa1\xff"), group_size=4)
    await swarm.broker.publish(TASKS, broken)
    real = swarm.broker.dead_letter
    told = []

    async def dead_letter(delivery, reason):
        told.append(swarm.arrived())
        await real(delivery, reason)

    swarm.broker.dead_letter = dead_letter
    async with working(swarm, lambda ep: 1.0) as worker:
        await worker.until(lambda: swarm.broker.stored(topology.DEAD))
        await worker.drained()
    ((begin, end),) = told
    assert (begin.slot, begin.kind, begin.mode, begin.group_size) == (broken.slot, "math", mode, 4)
    assert (begin.attempt, begin.ticket_id, begin.client_id) == (1, None, worker.worker._client.client_id)
    assert (end.episode_id, end.status, end.final) == (begin.episode_id, "failed", True)
    assert end.reason.startswith("not a task that can be attempted: 'utf-8' codec")


async def test_evaluation_tasks_need_no_ticket(swarm_of):
    swarm = await swarm_of()
    await swarm.broker.publish(TASKS, msgspec.structs.replace(task("a"), mode="eval"))
    async with working(swarm, lambda ep: 1.0) as worker:
        await worker.until(lambda: swarm.ends)
        await worker.drained()
    assert [begin.mode for begin in swarm.begins] == ["eval"]


async def test_a_worker_of_an_unknown_kind_says_which_kinds_there_are(swarm, client):
    with pytest.raises(EpisodeError, match="the run's kinds are math"):
        Worker(client, lambda ep: 1.0, kind="chess")
    with pytest.raises(TaskError, match="at least 1"):
        RunnerOptions(concurrency=0)


def test_messages_of_these_tests_survive_the_wire():
    from swarmq.messages import encode

    assert decode(encode(task("a"))).slot == Slot(task_id="a")


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_a_function_in_the_working_directory_is_found(module):
    module("my_agent_ok", "class A:\n    @staticmethod\n    def attempt(ep):\n        return 1.0\n")
    assert load_target("my_agent_ok:A.attempt")(None) == 1.0


def test_a_file_in_place_of_a_module_is_told_as_the_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("shop/agent.py", "./shop/agent.py", tmp_path / "shop" / "agent.py"):
        with pytest.raises(TaskError, match="names a file, not a module: write shop.agent:attempt$"):
            load_target(f"{file}:attempt")
    for file in ("../shop/agent.py", tmp_path.parent / "shop" / "agent.py"):
        with pytest.raises(TaskError, match=f"write agent:attempt in {tmp_path.parent}/shop$"):
            load_target(f"{file}:attempt")


@pytest.mark.parametrize(
    ("text", "target", "says"),
    [
        ("", "my_agent", "not of the form module:function"),
        ("", ":attempt", "not of the form module:function"),
        ("", "no_such_module:attempt", "no module 'no_such_module' in"),
        ("import no_such_package", "bad1:attempt", "bad1 needs 'no_such_package', which is not installed"),
        ("1 / 0", "bad2:attempt", "importing bad2 failed: ZeroDivisionError"),
        ("def atempt(ep): ...", "bad3:attempt", "did you mean 'atempt'"),
        ("attempt = 3", "bad4:attempt", "not a function"),
        ("def attempt(): ...", "bad5:attempt", "one argument, the episode"),
        ("def attempt(ep, *, key): ...", "bad6:attempt", "one argument, the episode"),
    ],
)
def test_a_target_that_cannot_work_says_why(module, text, target, says):
    module(target.partition(":")[0] or "unused", text) if "no_such" not in target else None
    with pytest.raises(TaskError, match=says):
        load_target(target)
