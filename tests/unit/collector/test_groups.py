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
