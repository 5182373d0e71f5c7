"""Drift is counted once per turn, and a policy that keeps losing its conversations is said to."""

import asyncio

import pytest

from swarmq.config import SwarmJob
from swarmq.drift import Drift
from swarmq.messages import Turn
from swarmq.proxy.meter import Meter
from swarmq.testing.scripted_engine import spelled


def turn(parent="c", branch=None, *, repaired=False, policy="main"):
    return Turn(
        run="r", episode_id="e", policy=policy, call_id="x", request_id="x", parent=parent, branch=branch,
        repaired=repaired, prompt_ids=b"", sampled_ids=b"\0" * 8, logprobs=b"\0" * 8,
    )  # fmt: skip


FIRST, GOOD, REPAIRED = turn(None), turn(), turn(repaired=True)


def test_the_rate_is_of_turns_that_had_one_to_continue():
    drift = Drift.of([FIRST, GOOD, REPAIRED, turn(branch="drift"), turn(None, "history_edited")])
    assert (drift.turns, drift.continued, drift.repaired, drift.drifted) == (5, 4, 1, 2)
    assert (drift.rate, drift.lost) == (0.5, 0.25)
    assert drift.branches == {"drift": 1, "history_edited": 1}
    assert "4 of 5" in str(drift)
    assert "50.0% drifted" in str(drift)


def test_a_branch_that_keeps_recorded_tokens_drifted_once():
    assert Drift.of([turn(branch="drift", repaired=True)]).drifted == 1


def test_no_turns_have_no_drift():
    assert (Drift.of([]).rate, Drift.of([FIRST]).lost) == (0.0, 0.0)


@pytest.mark.parametrize("reason", ["drift", "template_rewrote_history", "answer_cut"])
def test_a_policy_that_loses_its_conversations_is_said_to_once(reason):
    meter = Meter(alert=0.2, window=10)
    for _ in range(7):
        meter.take(GOOD)
    for _ in range(3):
        assert meter.alerts() == [], "too few turns to tell"
        meter.take(turn(branch=reason))
    (line,) = meter.alerts()
    assert "policy main: 30% of the last 10 turns" in line
    assert f"{reason} 3" in line
    assert meter.alerts() == []


def test_the_warning_comes_again_after_it_was_well():
    meter = Meter(alert=0.2, window=5)
    for expected, taken in ((1, turn(branch="drift")), (0, GOOD), (1, turn(branch="drift"))):
        for _ in range(5):
            meter.take(taken)
        assert len(meter.alerts()) == expected


def test_repairs_and_what_agents_edit_are_no_reason_to_warn():
    meter = Meter(alert=0.05, window=4)
    for taken in (REPAIRED, turn(branch="history_edited"), turn(branch="tools_changed"), REPAIRED):
        meter.take(taken)
    assert meter.alerts() == []


def test_policies_are_watched_apart():
    meter = Meter(alert=0.5, window=2)
    for _ in range(2):
        meter.take(GOOD)
        meter.take(turn(branch="drift", policy="other"))
    (line,) = meter.alerts()
    assert "policy other" in line


def test_the_threshold_is_a_setting():
    job = SwarmJob.build({"run": "r", "policies": {"main": {"model": "m"}}, "proxy": {"drift_alert": 0.5}})
    assert (job.proxy.drift_alert, job.proxy.drift_window) == (0.5, 100)


async def test_the_proxy_s_state_and_its_warning_say_how_much_drifted(stages):
    async with stages(drift_window=2, drift_alert=0.4) as stage, stage.broker.events("r") as events:
        messages = [{"role": "user", "content": "hello there"}]
        for text in ("general", "kenobi"):
            stage.engine.say(text, tokens=spelled(text))
            got = (await stage.ask(*messages))["choices"][0]["message"]
            messages += [got, {"role": "user", "content": "and"}]
        stage.engine.template = lambda chat: "rewritten " + chat["messages"][-1]["content"]
        stage.engine.say("x")
        await stage.ask(*messages)
        warning = state = None
        async with asyncio.timeout(120):
            async for event in events:
                state = event if event.name == "state" else state
                warning = event if event.name == "warning" else warning
                if warning and state and state.fields["continued"] == 2:
                    break
    assert "policy main: 50% of the last 2 turns" in warning.fields["text"]
    assert state.fields["branches"] == {"template_rewrote_history": 1}
    assert (state.fields["repaired"], state.fields["drift_rate"]) == (1, 0.5)
