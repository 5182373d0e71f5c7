"""Groups go on whole, or at their deadline with enough members, or not at all."""

from __future__ import annotations

import msgspec
import pytest

from swarmq.messages import Slot


@pytest.fixture
def bench(make_bench):
    return make_bench(group_size=4, min_group=2, deadline_s=100.0, max_staleness=0)


def finish(bench, say, episode, repeat=0, task="t", **fields):
    bench.take(say.begin(episode, task, repeat, group_size=4), say.turn(episode=episode), say.end(episode, **fields))


def test_a_whole_group_is_published_back_to_back(bench, say):
    for repeat in range(3):
        finish(bench, say, f"a{repeat}", repeat, "a")
        finish(bench, say, f"b{repeat}", repeat, "b")
    assert not bench.sent
    finish(bench, say, "b3", 3, "b")
    finish(bench, say, "a3", 3, "a")
    assert [item.episode_id for item in bench.sent] == ["b0", "b1", "b2", "b3", "a0", "a1", "a2", "a3"]
    assert {item.group_members for item in bench.sent} == {4}
    assert {episode.group_id for episode in bench.episodes} == {"a/0", "b/0"}


def test_repeats_of_another_epoch_are_another_group(bench, say):
    for epoch in range(4):
        begin = say.begin(f"e{epoch}", group_size=4)
        bench.take(msgspec.structs.replace(begin, slot=Slot(task_id="t", epoch=epoch)))
        bench.take(say.turn(episode=f"e{epoch}"), say.end(f"e{epoch}"))
    assert not bench.sent
    assert len(bench.core.groups.open) == 4


def test_at_the_deadline_enough_members_are_enough(bench, say):
    finish(bench, say, "a", 0)
    bench.wait(60)
    finish(bench, say, "b", 1)
    bench.wait(39)
    assert not bench.sent
    bench.wait(1)
    assert [(item.episode_id, item.group_members) for item in bench.sent] == [("a", 2), ("b", 2)]


def test_the_deadline_outlives_a_restart(bench, say):
    finish(bench, say, "a", 0)
    finish(bench, say, "b", 1)
    bench.wait(60)
    bench.restart()
    bench.wait(40)
    assert len(bench.sent) == 2


def test_a_sibling_after_that_is_late_and_costs_no_credit(bench, say):
    for repeat in range(3):
        bench.take(say.begin(f"e{repeat}", repeat=repeat, group_size=4), say.turn(episode=f"e{repeat}"))
    bench.take(say.end("e0"), say.end("e1"))
    bench.wait(100)
    issued = bench.tickets["math"]
    bench.restart()
    bench.take(say.end("e2"))
    finish(bench, say, "late", 3)
    assert bench.dropped == {"late_sibling": 2}
    assert len(bench.sent) == 2
    assert bench.tickets["math"] == issued


def test_below_the_minimum_the_members_are_dropped_and_their_tickets_issued_again(bench, say):
    bench.take(say.begin("a", group_size=4, ticket_id="math.1"), say.turn(episode="a"), say.end("a"))
    issued = bench.tickets["math"]
    bench.wait(100)
    assert bench.dropped == {"group_too_small": 1}
    assert bench.tickets["math"] == issued + 1
    assert bench.num_turns() == 0
    assert not bench.core.groups.open


def test_siblings_that_finish_later_still_make_a_group_among_themselves(bench, say):
    for repeat in range(4):
        bench.take(say.begin(f"e{repeat}", repeat=repeat, group_size=4), say.turn(episode=f"e{repeat}"))
    bench.take(say.end("e0"))
    bench.wait(100)
    bench.restart()
    for repeat in range(1, 4):
        bench.take(say.end(f"e{repeat}"))
    bench.wait(99)
    assert not bench.sent
    bench.wait(1)
    assert [item.episode_id for item in bench.sent] == ["e1", "e2", "e3"]


def test_a_policy_with_too_few_members_to_compare_gets_none(make_bench, say):
    both = ("planner", "executor")
    bench = make_bench(trained=both, known=both, group_size=3, min_group=2)
    for number in range(3):
        name = f"e{number}"
        bench.take(say.begin(name, repeat=number, group_size=3, policies=both))
        bench.take(say.turn("p", name, policy="planner"))
        if number == 0:
            bench.take(say.turn("x", name, policy="executor"))
        bench.take(say.end(name, rewards={"planner": 1.0, "executor": 1.0}))
    assert [(item.policy, item.group_members) for item in bench.sent] == [("planner", 3)] * 3
    bench.take(say.consumed("e0", "e1", "e2", policy="planner"))
    assert bench.state("e0") == ("trained", "")


def test_groups_of_one_need_no_siblings(make_bench, say):
    bench = make_bench(min_group=2, group_size=4)
    bench.take(say.begin(group_size=1), say.turn(), say.end())
    assert len(bench.sent) == 1


def test_a_group_that_lost_its_episodes_leaves_nothing_behind(bench, say):
    bench.take(say.begin("a", group_size=4), say.end("a", status="failed"))
    assert not bench.core.groups.open


# ------------------------------------------------------------------------------------------ slots given up


def fail(bench, say, episode, repeat=0, task="t", *, final=True, **fields):
    bench.take(say.begin(episode, task, repeat, group_size=4, **fields), say.end(episode, "failed", final=final))


def nothing_is_kept(bench):
    return not bench.core.groups.open and not bench.store.snapshot().given_up and not bench.store.snapshot().groups


@pytest.mark.parametrize("first", ["given up", "finished"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_goes_on_at_once_without_a_slot_that_is_given_up(bench, say, first, restarted):
    finished = [lambda number=number: finish(bench, say, f"e{number}", number) for number in range(3)]
    given_up = [lambda: fail(bench, say, "x", 3)]
    for act in given_up + finished if first == "given up" else finished + given_up:
        assert not bench.sent
        act()
        if restarted:
            bench.restart()
    assert [(item.episode_id, item.group_members) for item in bench.sent] == [(f"e{number}", 3) for number in range(3)]
    assert {episode.group_size for episode in bench.episodes} == {4}
    assert nothing_is_kept(bench)


def test_a_failure_that_is_not_the_last_attempt_is_waited_for(bench, say):
    for number in range(3):
        finish(bench, say, f"e{number}", number)
    fail(bench, say, "x", 3, final=False)
    bench.wait(99)
    assert not bench.sent
    finish(bench, say, "y", 3)
    assert len(bench.sent) == 4


def test_too_few_members_are_dropped_as_at_the_deadline_but_at_once(bench, say):
    bench.take(say.begin("a", group_size=4, ticket_id="math.1"), say.turn(episode="a"), say.end("a"))
    issued = bench.tickets["math"]
    for number in (1, 2, 3):
        assert bench.dropped.get("group_too_small") is None
        fail(bench, say, f"x{number}", number)
    assert bench.dropped == {"failed": 3, "group_too_small": 1}
    assert bench.tickets["math"] == issued + 1
    assert bench.num_turns() == 0
    assert nothing_is_kept(bench)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_slot_that_wins_after_it_was_given_up_has_won(bench, say, restarted):
    finish(bench, say, "a", 0)
    fail(bench, say, "x", 1)
    finish(bench, say, "b", 1)
    if restarted:
        bench.restart()
    fail(bench, say, "y", 2)
    assert not bench.sent
    finish(bench, say, "c", 3)
    assert [item.episode_id for item in bench.sent] == ["a", "b", "c"]


@pytest.mark.parametrize("ending", ["wins", "fails", "is silent"])
def test_another_attempt_at_a_slot_that_is_given_up_is_waited_for(bench, say, ending):
    bench.take(say.begin("twin", repeat=3, group_size=4))
    for number in range(3):
        finish(bench, say, f"e{number}", number)
    fail(bench, say, "x", 3)
    bench.restart()
    assert not bench.sent
    if ending == "wins":
        bench.take(say.turn(episode="twin"), say.end("twin"))
    elif ending == "fails":
        bench.take(say.end("twin", "failed"))
    else:
        bench.core.run.rules = msgspec.structs.replace(bench.rules, deadline_s=1e9)
        bench.wait(600)
    assert len(bench.sent) == (4 if ending == "wins" else 3)


def test_a_slot_whose_finished_attempt_cannot_be_trained_is_waited_for_no_longer(bench, say):
    for number in range(3):
        finish(bench, say, f"e{number}", number)
    bench.take(say.begin("idle", repeat=3, group_size=4), say.end("idle"))
    assert bench.dropped == {"no_turns": 1}
    assert len(bench.sent) == 3


def test_a_group_all_of_whose_slots_are_given_up_leaves_nothing_behind(bench, say):
    for number in range(4):
        assert len(bench.store.snapshot().given_up) == number
        fail(bench, say, f"x{number}", number)
    assert nothing_is_kept(bench)
    bench.wait(1000)
    assert not bench.sent
    assert bench.dropped == {"failed": 4}


def test_what_is_given_up_of_a_group_that_nobody_attempts_is_forgotten_after_a_deadline(bench, say):
    fail(bench, say, "x", 0)
    bench.wait(60)
    fail(bench, say, "y", 1)
    bench.restart()
    bench.wait(99)
    assert len(bench.store.snapshot().given_up) == 2
    bench.wait(1)
    assert nothing_is_kept(bench)


def test_what_is_given_up_of_a_group_is_kept_while_somebody_is_at_it(bench, say):
    fail(bench, say, "x", 0)
    bench.take(say.begin("slow", repeat=1, group_size=4))
    bench.wait(500)
    for number in (2, 3):
        fail(bench, say, f"y{number}", number)
    bench.take(say.turn(episode="slow"), say.end("slow"))
    assert bench.dropped == {"failed": 3, "group_too_small": 1}
    assert nothing_is_kept(bench)


def test_what_is_given_up_of_a_group_that_has_members_is_kept_until_it_goes_on(bench, say):
    fail(bench, say, "x", 0)
    bench.wait(60)
    for number in (1, 2):
        finish(bench, say, f"e{number}", number)
    bench.wait(60)
    fail(bench, say, "y", 3)
    assert [item.episode_id for item in bench.sent] == ["e1", "e2"]


def test_a_slot_is_given_up_once_however_many_are_the_last_at_it(bench, say):
    for name in ("x", "twin"):
        bench.take(say.begin(name, repeat=3, group_size=4))
    for name in ("x", "twin"):
        bench.take(say.end(name, "failed", final=True))
    assert bench.core.counts["slot_given_up"] == len(bench.store.snapshot().given_up) == 1


def test_a_slot_beyond_its_group_is_waited_for_like_any_other(bench, say):
    bench.take(say.begin("beyond", repeat=9, group_size=4))
    for number in range(4):
        fail(bench, say, f"x{number}", number)
    assert bench.core.groups.usage()["math"].running == 1
    bench.take(say.end("beyond", "failed"))
    assert nothing_is_kept(bench)


def test_a_last_attempt_that_is_told_again_or_too_late_changes_nothing(bench, say):
    for number in range(3):
        finish(bench, say, f"e{number}", number)
    bench.take(say.begin("late", repeat=3, group_size=4))
    fail(bench, say, "x", 3)
    bench.restart()
    bench.take(say.end("x", "failed", final=True))
    assert not bench.sent
    bench.wait(100)
    assert len(bench.sent) == 3
    bench.take(say.end("late", "aborted", final=True), say.end("late", "aborted", final=True))
    assert bench.core.counts["slot_given_up"] == 1
    assert bench.core.counts["duplicates"] == 2
    assert len(bench.sent) == 3
    assert nothing_is_kept(bench)


def test_an_attempt_that_comes_too_late_for_its_slot_gives_nothing_up(bench, say):
    bench.take(say.begin("second", repeat=0, group_size=4), say.turn(episode="second"))
    finish(bench, say, "first", 0)
    bench.take(say.end("second"))
    fail(bench, say, "third", 0)
    assert bench.dropped == {"superseded": 1, "failed": 1}
    assert bench.core.counts["slot_given_up"] == 0


def test_an_evaluation_gives_nothing_up(bench, say):
    fail(bench, say, "x", 0, mode="eval")
    assert bench.core.counts["slot_given_up"] == 0
    assert nothing_is_kept(bench)
