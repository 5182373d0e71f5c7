"""Drift is counted once per turn, and a policy that keeps losing its conversations is said to."""

import asyncio
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from swarmq.config import SwarmJob
from swarmq.messages import Turn
from swarmq.proxy.counters import REMEDIES, Counters
from swarmq.proxy.episodes.conversation_graph import Reason
from swarmq.testing.scripted_engine import encode_characters
from swarmq.token_drift import EDITED, LOST, Drift


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
    meter = Counters(alert=0.2, window=10)
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
    meter = Counters(alert=0.2, window=5)
    for expected, taken in ((1, turn(branch="drift")), (0, GOOD), (1, turn(branch="drift"))):
        for _ in range(5):
            meter.take(taken)
        assert len(meter.alerts()) == expected


def test_repairs_and_what_agents_edit_are_no_reason_to_warn():
    meter = Counters(alert=0.05, window=4)
    for taken in (REPAIRED, turn(branch="history_edited"), turn(branch="tools_changed"), REPAIRED):
        meter.take(taken)
    assert meter.alerts() == []


def test_an_agent_that_edits_its_history_in_most_turns_is_told_what_avoids_it():
    meter = Counters(alert=0.05, window=4)
    for taken in (GOOD, *[turn(None, branch="history_edited")] * 3):
        meter.take(taken)
    (line,) = meter.alerts()
    assert "policy main: 75% of the last 4 turns" in line
    assert "what changes (a clock, a step number) in the newest" in line
    silent = Counters(alert=1.0, window=1)
    silent.take(turn(branch="history_edited"))
    assert silent.alerts() == []


@pytest.mark.parametrize("reason", sorted(LOST | EDITED))
def test_a_warning_names_the_remedy_of_the_most_frequent_reason_and_its_page(reason):
    meter = Counters(alert=0.01, window=5)
    for taken in (turn(branch="drift" if reason != "drift" else "answer_cut"), *[turn(branch=reason)] * 4):
        meter.take(taken)
    (line,) = meter.alerts()
    assert f"Most often: {reason}: {REMEDIES[reason]}" in line
    assert "docs/explanation/proxy.md, 'Branches'" in line


def test_every_reason_stands_in_the_table_of_the_docs():
    text = (Path(__file__).parents[3] / "docs/explanation/proxy.md").read_text()
    table = text.partition("## Branches")[2].partition("\n## ")[0]
    assert {line.split("`")[1] for line in table.splitlines() if line.startswith("| `") and "`branch`" not in line} == {
        *get_args(Reason)
    }


def test_a_turn_that_only_begins_like_another_had_none_to_continue():
    begun = msgspec.structs.replace(GOOD, begins=True)
    assert Drift.of([GOOD, begun]).continued == 1
    assert Drift.of([msgspec.structs.replace(begun, branch="history_edited")]).continued == 1


def test_policies_are_watched_apart():
    meter = Counters(alert=0.5, window=2)
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
            stage.engine.say(text, tokens=encode_characters(text))
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


def test_that_answers_are_cut_is_told_once_for_each_limit_with_the_longest_wish():
    meter = Counters()
    for asked in (600, 4000, 700):
        meter.cut("main", asked=asked, limit=512)
    (line,) = meter.alerts()
    assert "answers of 4000 tokens (max_tokens) and get 512 at most" in line
    meter.cut("main", asked=9000, limit=512)
    assert meter.alerts() == []
    meter.cut("main", asked=9000, limit=1024)
    assert len(meter.alerts()) == 1
