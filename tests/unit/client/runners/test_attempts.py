"""Many episodes: everything is attempted, failures are retried and shown, nothing ends the run."""

import asyncio
import functools
import json
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from swarmq.client.data.tasks import SlotNumbering, SwarmTask
from swarmq.client.episodes.client import KEY_LIFETIME_S, ClientLimits
from swarmq.client.runners.attempts import ATTEMPT_TIMEOUT_S
from swarmq.client.runners.task_list import plan_slots
from swarmq.errors import EpisodeError, TaskError
from swarmq.messages import EpisodeEnd
from swarmq.outcome import Outcome

FAST = {"retry_pause_s": 0.0, "progress": False}
TASKS = [{"id": f"t{number}", "n": number} for number in range(5)]


def right(ep):
    return Outcome(1.0, success=True)


async def test_every_repeat_of_every_task_in_every_epoch_is_attempted_once(swarm, client):
    summary = await client.run_episodes_until_all_complete(TASKS, right, repeats=3, epochs=2, concurrency=4, **FAST)
    assert (summary.slots, summary.finished, summary.failed, summary.reward_mean) == (30, 30, 0, 1.0)
    slots = [begin.slot for begin in swarm.begins]
    assert len({slot.id for slot in slots}) == 30
    assert len({slot.group_id for slot in slots}) == 10
    assert {begin.group_size for begin in swarm.begins} == {3}
    assert {end.status for end in swarm.ends} == {"finished"}


async def test_siblings_run_near_each_other(swarm, client):
    await client.run_episodes_until_all_complete(TASKS, right, concurrency=1, **FAST)
    assert [begin.slot.task_id for begin in swarm.begins] == [name for task in TASKS for name in [task["id"]] * 2]


async def test_repeats_are_the_runs_group_size_unless_said_otherwise(swarm, client):
    summary = await client.run_episodes_until_all_complete(TASKS, right, **FAST)
    assert summary.slots == len(TASKS) * 2


async def test_coroutines_threads_partials_and_callable_objects_are_all_agents(swarm, client):
    async def coroutine(ep):
        await asyncio.sleep(0)
        return 1.0

    def takes_more(more, ep):
        return more

    class Agent:
        async def __call__(self, ep):
            return 0.5

    for function in (coroutine, functools.partial(takes_more, 0.25), functools.partial(coroutine), Agent()):
        summary = await client.run_episodes_until_all_complete(TASKS[:1], function, repeats=1, **FAST)
        assert summary.finished == 1


async def test_never_more_than_concurrency_episodes_are_open(swarm, client):
    busy, most, gate = 0, 0, asyncio.Event()

    async def agent(ep):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        if busy == 3:
            gate.set()
        await gate.wait()
        busy -= 1
        return 1.0

    await client.run_episodes_until_all_complete(TASKS, agent, repeats=2, concurrency=3, **FAST)
    assert most == 3


async def test_blocking_agents_run_beside_each_other(swarm, client):
    together = threading.Barrier(4, timeout=120)

    def agent(ep):
        together.wait()
        return 1.0

    summary = await client.run_episodes_until_all_complete(TASKS[:4], agent, repeats=1, concurrency=4, **FAST)
    assert summary.finished == 4


async def test_a_failing_agent_is_retried_as_a_new_attempt_of_its_slot(swarm, client, capsys):
    def agent(ep):
        if ep.attempt == 0:
            raise ConnectionError("the sandbox is gone")
        return 1.0

    summary = await client.run_episodes_until_all_complete(TASKS, agent, repeats=1, **FAST)
    assert (summary.finished, summary.failed, summary.given_up, summary.slots) == (5, 5, 0, 5)
    assert summary.failures == {"ConnectionError: the sandbox is gone": 5}
    by_slot = {}
    for begin in swarm.begins:
        by_slot.setdefault(begin.slot.id, []).append(begin.attempt)
    assert all(attempts == [0, 1] for attempts in by_slot.values())
    reasons = [end.reason for end in swarm.ends if end.status == "failed"]
    assert len(reasons) == 5
    assert all("the sandbox is gone" in reason for reason in reasons)


async def test_a_slot_is_given_up_after_its_last_attempt_and_the_run_goes_on(swarm, client, capsys):
    def agent(ep):
        if ep.task.id == "t2":
            raise ValueError("never works")
        return 1.0

    summary = await client.run_episodes_until_all_complete(TASKS, agent, repeats=1, max_attempts=2, **FAST)
    assert (summary.finished, summary.given_up, summary.slots) == (4, 1, 5)
    assert [end.final for end in swarm.ends if end.status == "failed"] == [False, True]
    assert not any(end.final for end in swarm.ends if end.status == "finished")
    again = await client.run_episodes_until_all_complete(TASKS, agent, repeats=1, auto_retry=False, **FAST)
    assert (again.failed, again.given_up) == (1, 1)
    assert [end.final for end in swarm.ends if end.status == "failed"] == [False, True, True]


async def test_a_last_attempt_that_its_agent_aborts_is_the_last(swarm, client):
    async def agent(ep):
        await ep.abort("no verdict")

    await client.run_episodes_until_all_complete(TASKS[:1], agent, repeats=1, max_attempts=2, **FAST)
    assert [(end.status, end.final) for end in swarm.ends] == [("aborted", False), ("aborted", True)]


def test_an_attempt_may_take_as_long_as_its_key_lives():
    assert ATTEMPT_TIMEOUT_S == KEY_LIFETIME_S


async def test_a_coroutine_that_hangs_fails_its_episode_and_frees_its_lane(swarm, client, capsys):
    cancelled = []

    async def agent(ep):
        if ep.task.id == "t0":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(ep.attempt)
                raise
        return 1.0

    summary = await client.run_episodes_until_all_complete(
        TASKS, agent, repeats=1, concurrency=1, max_attempts=2, attempt_timeout_s=0.01, **FAST
    )
    assert (summary.finished, summary.failed, summary.given_up) == (4, 2, 1)
    assert cancelled == [0, 1]
    failed = [end for end in swarm.ends if end.status == "failed"]
    assert [end.rewards for end in failed] == [{}, {}]
    assert "has not returned within 0.01 s (attempt_timeout_s); it was cancelled" in failed[0].reason
    assert capsys.readouterr().err.count("AttemptTimeoutError") == 2, "shown once, and counted"


async def test_a_thread_that_hangs_is_left_to_itself_and_its_lane_goes_on(swarm, client, capsys, impatient):
    impatient(lambda ep: ep.task.id == "t0")
    hangs, said, late = threading.Event(), threading.Event(), []

    def agent(ep):
        if ep.task.id == "t0":
            hangs.wait()
            try:
                ep.end(1.0)
            except EpisodeError as error:
                late.append(str(error))
                said.set()
        return 1.0

    try:
        summary = await client.run_episodes_until_all_complete(
            TASKS, agent, repeats=1, concurrency=1, auto_retry=False, **FAST
        )
    finally:
        hangs.set()
    assert (summary.finished, summary.given_up) == (4, 1)
    assert "its thread goes on" in capsys.readouterr().err
    await asyncio.to_thread(said.wait)
    assert "the first end counts, nothing was sent" in late[0], "what it says later changes nothing"


async def test_what_an_interrupted_agent_returns_is_no_reward(swarm, client, capsys):
    async def agent(ep):
        try:
            await asyncio.Event().wait()
        except BaseException:
            return 0.0

    summary = await client.run_episodes_until_all_complete(
        TASKS[:1], agent, repeats=1, auto_retry=False, attempt_timeout_s=0.01, **FAST
    )
    assert (summary.finished, summary.failed) == (0, 1)
    assert [(end.status, end.rewards) for end in swarm.ends] == [("failed", {})]


async def test_an_end_that_is_under_way_at_the_deadline_is_waited_for(swarm, monkeypatch):
    confirm, real = asyncio.Event(), swarm.broker.publish

    async def publish(queue, message, *, deadline_s=None):
        if isinstance(message, EpisodeEnd):
            await confirm.wait()
        await real(queue, message, deadline_s=deadline_s)

    async def agent(ep):
        asyncio.get_running_loop().call_later(0.05, confirm.set)
        await ep.end(1.0)

    monkeypatch.setattr(swarm.broker, "publish", publish)
    async with swarm.client(limits=ClientLimits(abort_timeout_s=600.0)) as client:
        summary = await client.run_episodes_until_all_complete(
            TASKS[:1], agent, repeats=1, attempt_timeout_s=0.01, **FAST
        )
    assert (summary.finished, summary.failed) == (1, 0)
    assert [end.rewards for end in swarm.ends] == [{"main": 1.0}]


async def test_an_agent_that_runs_long_is_told_of_in_one_line(swarm):
    async def agent(ep):
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, later.set)
        await later.wait()
        return 1.0

    async with swarm.client(limits=ClientLimits(slow_attempt_s=0.0)) as client:
        with capture_logs() as told:
            await client.run_episodes_until_all_complete(TASKS[:1], agent, repeats=1, **FAST)
    assert (told[0]["event"], told[0]["task"], told[0]["fails_after_s"]) == ("agent_runs_long", "t0", 7200.0)


async def test_a_traceback_is_shown_once_however_often_it_comes(swarm, client, capsys):
    def agent(ep):
        return ep.payload["missing"]

    await client.run_episodes_until_all_complete(TASKS, agent, repeats=1, auto_retry=False, **FAST)
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 1
    assert "KeyError: 'missing'" in shown
    assert 'return ep.payload["missing"]' in shown
    assert "4 more times: KeyError" in shown
    assert "swarmq/client" not in shown


async def test_what_repeats_is_named_by_the_line_of_the_agent_and_not_of_a_library(swarm, client, capsys):
    def agent(ep):
        return json.loads("no json")

    await client.run_episodes_until_all_complete(TASKS, agent, repeats=1, auto_retry=False, **FAST)
    line = agent.__code__.co_firstlineno + 1
    assert f"4 more times: JSONDecodeError at {__file__}:{line}\n" in capsys.readouterr().err


async def test_a_line_of_progress_has_figures_for_people_and_none_that_is_unknown(swarm):
    async with swarm.client(limits=ClientLimits(progress_interval_s=0.0)) as client:
        with capture_logs() as told:
            await client.run_episodes_until_all_complete(
                iter(TASKS[:1]), lambda _ep: 1 / 3, repeats=1, retry_pause_s=0.0
            )
    [line] = [one for one in told if one["event"] == "progress"]
    assert line == {"event": "progress", "log_level": "info"} | {
        "of": "episodes", "slots": 1, "reward_mean": "0.333", "failed": 0
    }  # fmt: skip


async def test_an_outcome_that_is_wrong_is_told_with_who_returned_it(swarm, client, capsys):
    def agent(ep):
        return Outcome(0.5, metrics={"length": float("nan")})

    await client.run_episodes_until_all_complete(TASKS[:1], agent, repeats=1, auto_retry=False, **FAST)
    shown = capsys.readouterr().err
    assert re.search(r"agent \(test_attempts.py:\d+\) returned an Outcome: metrics.length is nan", shown)


@pytest.mark.parametrize("returned", [None, float("nan"), "1.0"])
async def test_a_reward_that_is_no_number_fails_the_episode_and_is_never_a_zero(swarm, client, returned, capsys):
    summary = await client.run_episodes_until_all_complete(
        TASKS[:1], lambda ep: returned, repeats=1, auto_retry=False, **FAST
    )
    assert (summary.finished, summary.failed) == (0, 1)
    assert [(end.status, end.rewards) for end in swarm.ends] == [("failed", {})]
    shown = capsys.readouterr().err
    assert re.search(r"attempt 1: what .*<lambda> \(test_attempts.py:\d+\) returned is (None|nan|'1.0')", shown)
    assert "Traceback" not in shown, "there is nothing of the agent's in it"
    assert "swarmq/client" not in shown
    [reason] = [end.reason for end in swarm.ends]
    assert reason.startswith("swarmq.errors.OutcomeError: what"), "nor in what is recorded of it"


async def test_an_agent_may_end_its_episode_itself(swarm, client):
    async def agent(ep):
        await ep.end(0.75)

    def gives_up(ep):
        ep.abort("not today")

    summary = await client.run_episodes_until_all_complete(TASKS[:1], agent, repeats=1, **FAST)
    assert summary.reward_mean == 0.75
    summary = await client.run_episodes_until_all_complete(TASKS[:1], gives_up, repeats=1, auto_retry=False, **FAST)
    assert (summary.failed, summary.failures) == (1, {"ended by the agent without a reward": 1})
    assert swarm.ends[-1].reason == "not today"


@pytest.mark.parametrize("leave", [SystemExit, asyncio.CancelledError, StopIteration])
async def test_not_even_an_agent_that_exits_ends_the_run(swarm, client, leave, capsys):
    def agent(ep):
        raise leave

    summary = await client.run_episodes_until_all_complete(TASKS[:2], agent, repeats=1, auto_retry=False, **FAST)
    assert summary.failed == 2


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_stopping_the_run_aborts_its_episodes(swarm, client, max_attempts):
    started = asyncio.Event()

    async def agent(ep):
        started.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(
        client.run_episodes_until_all_complete(
            TASKS, agent, repeats=1, concurrency=2, max_attempts=max_attempts, **FAST
        )
    )
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {end.status for end in swarm.ends} == {"aborted"}
    assert not any(end.final for end in swarm.ends), "whoever stops it may start it again"
    assert len(swarm.ends) == len(swarm.begins)


async def test_tasks_are_read_only_as_they_are_needed(swarm, client):
    read = []

    def endless():
        for number in range(10**9):
            read.append(number)
            if number == 20:
                raise RuntimeError("the source broke")
            yield {"id": str(number)}

    with pytest.raises(RuntimeError, match="the source broke"):
        await client.run_episodes_until_all_complete(endless(), right, repeats=1, concurrency=2, **FAST)
    assert len(read) == 21


async def test_asynchronous_sources_work_too(swarm, client):
    async def source():
        for number in range(3):
            yield SwarmTask(str(number))

    summary = await client.run_episodes_until_all_complete(source(), right, repeats=1, **FAST)
    assert summary.slots == 3


async def test_what_is_wrong_with_the_call_is_said_before_any_episode(swarm, client):
    run = client.run_episodes_until_all_complete
    with pytest.raises(TaskError, match="read more than once"):
        await run(iter(TASKS), right, epochs=2, **FAST)
    with pytest.raises(TaskError, match="one argument, the episode"):
        await run(TASKS, lambda: 1.0, **FAST)
    with pytest.raises(TaskError, match="not a function"):
        await run(TASKS, 3, **FAST)
    for wrong in ({"concurrency": 0}, {"max_attempts": 0}, {"epochs": 0}, {"repeats": -1}):
        with pytest.raises(TaskError, match="at least 1"):
            await run(TASKS, right, **wrong, **FAST)
    with pytest.raises(TaskError, match="attempt_timeout_s is 0"):
        await run(TASKS, right, attempt_timeout_s=0, **FAST)
    with pytest.raises(EpisodeError, match="kind 'chess'"):
        await run([SwarmTask("t", "chess")], right, **FAST)
    assert swarm.begins == []


async def test_the_code_that_scored_an_episode_is_recorded(swarm, client):
    await client.run_episodes_until_all_complete(TASKS[:1], right, repeats=1, **FAST)
    assert len(swarm.begins[0].code_version) == 12
    async with swarm.client(code_version="reward-2") as told:
        await told.run_episodes_until_all_complete(TASKS[:1], right, repeats=1, **FAST)
        await told.begin_episode("t")
    assert [begin.code_version for begin in swarm.begins[1:]] == ["reward-2", "reward-2"]


async def test_a_second_start_with_first_epoch_names_the_same_slots_and_without_it_others(swarm, client):
    for _ in range(2):
        await client.run_episodes_until_all_complete(TASKS, right, repeats=1, first_epoch=3, **FAST)
    slots = [begin.slot.id for begin in swarm.begins]
    assert sorted(slots[:5]) == sorted(slots[5:])
    await client.run_episodes_until_all_complete(TASKS, right, repeats=1, **FAST)
    assert not set(slots) & {begin.slot.id for begin in swarm.begins[10:]}


@given(st.lists(st.sampled_from("abc"), max_size=8), st.integers(1, 4), st.integers(1, 3))
def test_no_slot_is_planned_twice(names, repeats, epochs):
    async def collect(numbering):
        tasks = [{"id": name} for name in names]
        return [one async for one in plan_slots(tasks, repeats=repeats, epochs=epochs, numbering=numbering)]

    plans = asyncio.run(collect(SlotNumbering()))
    assert len({one.slot.id for one in plans}) == len(plans) == len(names) * repeats * epochs
    if len(set(names)) < len(names):
        with pytest.raises(TaskError, match="ids must differ"):
            asyncio.run(collect(None))


async def test_evaluation_never_asks_for_tickets_and_reports_with_its_error(swarm_of):
    swarm = await swarm_of()
    async with swarm.client() as client:

        def agent(ep):
            return Outcome(float(ep.payload["n"] % 2), success=ep.payload["n"] % 2 == 1)

        report = await client.evaluate(TASKS, agent, repeats=2, **FAST)
    assert {begin.mode for begin in swarm.begins} == {"eval"}
    assert (report.n, report.tasks, report.failed, report.mean_reward) == (10, 5, 0, 0.4)
    assert report.success_rate == pytest.approx(0.4)
    low, high = report.reward_interval
    assert low < 0.4 < high
    assert "reward 0.400 ±" in str(report)


async def test_an_evaluation_whose_agent_breaks_counts_it_apart(swarm, client, capsys):
    def agent(ep):
        if ep.task.id == "t0":
            raise OSError("no browser")
        return 1.0

    report = await client.evaluate(TASKS, agent, **FAST)
    assert (report.n, report.failed, report.mean_reward) == (4, 1, 1.0)
