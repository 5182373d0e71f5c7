"""When nothing moves, one line says who waits for whom, and why."""

from __future__ import annotations

import pytest

from swarmq.collector.report import PATIENCE_S, NoTurnsWarnings, StandstillWatch, state_fields
from swarmq.event_fields import undescribed
from swarmq.messages import Event


@pytest.fixture
def bench(make_bench):
    return make_bench(group_size=8, min_group=2, deadline_s=600.0)


def lines(bench, watch, seconds):
    watch.find_warnings(bench.core, bench.now)
    bench.now += seconds
    return watch.find_warnings(bench.core, bench.now)


def finish(bench, say, number):
    name = f"e{number}"
    bench.take(say.begin(name, "t17", number, group_size=8), say.turn(episode=name), say.end(name))


def test_a_group_that_waits_is_named_with_what_will_become_of_it(bench, say):
    bench.core.tickets.out["math"].clear()
    for number in range(6):
        finish(bench, say, number)
    bench.core.tickets.out["math"].clear()
    (line,) = lines(bench, StandstillWatch(), PATIENCE_S)
    assert line == (
        "group t17/0 waits 120 s for 2 of 8 members, 0 of them running; at 600 s (groups.deadline_s) it goes on "
        "with 6; nothing has moved for 120 s"
    )


def test_a_group_that_will_be_dropped_is_said_to_need_more(bench, say):
    finish(bench, say, 0)
    bench.core.tickets.out["math"].clear()
    (line,) = lines(bench, StandstillWatch(), PATIENCE_S)
    assert "at 600 s (groups.deadline_s) it is dropped, as it has 1 and needs 2 (groups.min_group); nothing" in line


def test_a_group_is_said_to_wait_for_those_who_may_still_come(bench, say):
    for number in range(6):
        finish(bench, say, number)
    bench.take(say.begin("x", "t17", 6, group_size=8), say.end("x", "failed", final=True))
    bench.core.tickets.out["math"].clear()
    (line,) = lines(bench, StandstillWatch(), PATIENCE_S)
    assert line.startswith(
        "group t17/0 waits 120 s for 1 of 8 members, 0 of them running; at 600 s (groups.deadline_s) it goes on"
    )


def test_tickets_that_nobody_takes_are_named(bench):
    (line,) = lines(bench, StandstillWatch(), PATIENCE_S)
    assert "32 tickets out, 0 episodes open: no client takes tickets of kind math, or its tasks are all done" in line


def test_a_learner_that_does_not_report_is_named(make_bench, say):
    bench = make_bench(groups_per_batch=1, max_staleness=0)
    bench.take(say.begin(ticket_id="math.1"), say.turn(), say.end())
    (line,) = lines(bench, StandstillWatch(), PATIENCE_S)
    assert line.startswith("1 group waits for the learner of main at version 0")


def test_the_fields_of_a_state_event_are_described(bench):
    fields = {**state_fields(bench.core), "transcripts_lost": 0}
    assert not undescribed(Event(run="r", source="collector", name="state", at=0.0, fields=fields))


def test_agents_that_do_not_call_the_model_are_named(make_bench, say):
    bench = make_bench(groups_per_batch=1, max_staleness=0)
    bench.take(say.begin(ticket_id="math.1"))
    (line,) = lines(bench, StandstillWatch(), PATIENCE_S)
    assert line.startswith("no turns: 1 episode is open")


def test_the_watch_is_quiet_while_things_move_and_repeats_itself_patiently(bench, say):
    watch = StandstillWatch()
    assert lines(bench, watch, PATIENCE_S - 1) == []
    bench.take(say.begin("e0", group_size=8), say.turn(episode="e0"))
    assert lines(bench, watch, 10) == []
    assert len(lines(bench, watch, PATIENCE_S)) == 1
    assert lines(bench, watch, 10) == []
    assert len(lines(bench, watch, PATIENCE_S)) == 1


def test_every_episode_that_began_is_somewhere(make_bench, say):
    bench = make_bench(group_size=1)
    bench.take(say.begin("a", "a"), say.turn(episode="a"), say.end("a"), say.consumed("a"))
    bench.take(say.begin("b", "b"), say.turn(episode="b"), say.end("b"))
    bench.take(say.begin("c", "c"), say.end("c", status="failed"))
    bench.take(say.begin("d", "d"), say.begin("v", "v", mode="eval"), say.end("v"))
    told = state_fields(bench.core)
    assert told["begun"] == 4
    assert (told["trained"], told["in_learners"], told["open"], told["dropped"]) == (1, 1, 1, {"failed": 1})
    assert told["eval_finished"] == 1
    assert told["versions"] == {"main": 1}


def test_an_episode_whose_calls_were_refused_is_told_with_the_reason(make_bench, say):
    bench, told = make_bench(group_size=1), NoTurnsWarnings()
    bench.take(say.begin("a", "a"), say.end("a"))
    told.note_refusal({"episode_id": "a", "why": "tools of type 'namespace' are not served"})
    line = told.check(bench.events("episode")[0], 0.0)
    assert "its calls were refused: tools of type 'namespace' are not served" in line
    assert "ep.base_url" not in line


def test_episodes_without_a_model_call_are_told_of_patiently(make_bench, say):
    bench, told = make_bench(group_size=1), NoTurnsWarnings()
    for name in "abcd":
        bench.take(say.begin(name, name, client_id="alice"), *([say.turn(episode="d")] if name == "d" else []))
        bench.take(say.end(name))
    episodes = bench.events("episode")
    lines = [told.check(episode, 0.0) for episode in episodes]
    assert lines[0].startswith("1 episode ended without a model call and is not trained, the last a of client alice")
    assert "ep.base_url and ep.api_key" in lines[0]
    assert lines[1:] == [None, None, None]
    assert told.check(episodes[3], PATIENCE_S) is None, "this one has turns"
    assert told.check(episodes[0], PATIENCE_S).startswith("3 episodes ended")
