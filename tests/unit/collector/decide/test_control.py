"""Commands while a run is up: obeyed once, all or nothing, remembered, and told to every learner."""

from __future__ import annotations

import msgspec
import pytest

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import Rules
from swarmq.collector.report import state_fields
from swarmq.config import SwarmJob
from swarmq.live_settings import find_reached_limits
from swarmq.messages import Command, Control
from unit.collector.twin_store import TwinStore

RATE = "policies.main.train.learning_rate"


def job(**groups) -> SwarmJob:
    return SwarmJob.build(
        {
            "run": "r",
            "mix": {"a": 0.5, "b": 0.5},
            "kinds": {"c": {}},
            "policies": {"main": {"model": "m"}},
            "groups": {"group_size": 1, "min_group": 1, "groups_per_batch": 4, "max_staleness": 1, **groups},
        }
    )


@pytest.fixture
def steered(make_bench):
    """A bench whose collector has a job, and so takes commands."""

    def make(**groups):
        bench = make_bench()
        file = job(**groups)
        bench.make_core = lambda: Core(Rules.of(file), bench.store, bench.store.snapshot(), now=bench.now, job=file)
        bench.effects.clear()
        bench.store = TwinStore(run="r")
        bench.restart = lambda: setattr(bench, "core", bench.make_core())
        bench.restart()
        bench.settle()
        return bench

    return make


def command(number: int, action: str = "set", **settings) -> Command:
    return Command(run="r", command_id=f"c{number}", action=action, settings=settings)


def state(bench) -> Control:
    return bench.store.control() or Control(run="r", number=0)


def train(bench, say, version: int, **counts: int) -> None:
    """A batch of so many groups of each kind, attempted with tickets that are out, and trained."""
    names = []
    for kind, count in counts.items():
        for ticket in sorted(bench.core.tickets.out[kind], key=lambda t: int(t.split(".")[1]))[:count]:
            bench.take(
                say.begin(ticket, ticket, kind=kind, ticket_id=ticket), say.turn(episode=ticket), say.end(ticket)
            )
            names.append(ticket)
    bench.take(say.consumed(*names, version=version))


def test_a_setting_is_acknowledged_remembered_and_told_to_the_learner(steered):
    bench = steered()
    bench.take(command(1, **{RATE: 1e-5, "groups.idle_timeout_s": 60.0}))
    (reply,) = bench.events("control")
    assert (reply["state"], reply["number"], reply["learners"]) == ("accepted", 1, ["main"])
    assert {c["path"]: (c["before"], c["value"]) for c in reply["changes"]} == {
        RATE: (1e-6, 1e-5),
        "groups.idle_timeout_s": (600.0, 60.0),
    }
    assert [e for e in bench.effects if isinstance(e, do.SendControl)] == [do.SendControl("main", 1)]
    assert do.SendControl("main", 1) in bench.store.outbox(), "told again by the next collector, until it is confirmed"
    bench.restart()
    assert bench.core.rules.idle_timeout_s == 60.0
    bench.run(bench.core.confirm_control("main", 1))
    assert do.SendControl("main", 1) not in bench.store.outbox()


def test_a_command_that_comes_again_is_answered_again_and_not_obeyed_again(steered):
    bench = steered()
    bench.take(command(1, "checkpoint"), command(1, "checkpoint"))
    bench.restart()
    bench.take(command(1, "checkpoint"))
    assert state(bench).checkpoints == 1
    assert len(bench.events("control")) == 3
    assert len({str(sorted(reply.items())) for reply in bench.events("control")}) == 1


def test_of_a_command_with_one_wrong_setting_nothing_is_applied(steered):
    bench = steered()
    bench.take(command(1, **{"groups.idle_timeout_s": 60.0, RATE: -1.0}))
    (reply,) = bench.events("control")
    assert reply["state"] == "refused"
    assert "learning_rate" in reply["text"]
    assert bench.core.rules.idle_timeout_s == 600.0
    assert state(bench).number == 0


LAST = "policies.main.train.max_steps"


def test_a_run_that_is_to_stop_ends_after_the_present_step_or_a_later_one(steered, say):
    bench = steered()
    train(bench, say, 1, a=2, b=2)
    bench.take(command(1, "stop", main=7))
    assert (bench.core.rules.last_steps, bench.core.run.learning()) == ({"main": 7}, ("main",))
    bench.take(command(2, "stop", main=None))
    assert (bench.core.rules.last_steps, bench.core.run.learning()) == ({"main": 1}, ())
    replies = bench.events("control")
    assert [(reply["action"], reply["changes"][0]["path"], reply["learners"]) for reply in replies] == [
        ("stop", LAST, ["main"])
    ] * 2


@pytest.mark.parametrize(
    ("made", "after", "why"),
    [(1, 1, "--after 1: main has made 1 step"), (0, None, "main has made no step yet"), (1, "x", LAST)],
)
def test_a_stop_that_cannot_be_is_refused_by_what_was_asked(steered, say, made, after, why):
    bench = steered()
    if made:
        train(bench, say, made, a=2, b=2)
    bench.take(command(1, "stop", main=after))
    (reply,) = bench.events("control")
    assert reply["state"] == "refused"
    assert why in reply["text"]
    assert state(bench).number == 0


def test_a_run_that_was_stopped_trains_on_when_it_is_resumed(steered, say):
    bench = steered()
    train(bench, say, 1, a=2, b=2)
    bench.take(command(1, "stop", main=None))
    assert bench.core.run.learning() == ()
    bench.take(command(2, "resume"))
    assert bench.core.run.learning() == ("main",)
    assert bench.events("control")[-1]["changes"] == [{"path": LAST, "before": 1, "value": 0}]
    assert state(bench).changes == ()
    bench.restart()
    assert bench.core.run.learning() == ("main",)


def test_a_last_step_that_is_ahead_outlives_a_pause(steered, say):
    bench = steered()
    train(bench, say, 1, a=2, b=2)
    bench.take(command(1, "stop", main=7), command(2, "pause"), command(3, "resume"))
    assert bench.core.rules.last_steps == {"main": 7}
    assert "changes" not in bench.events("control")[-1]


def test_a_last_step_of_the_job_file_is_not_lifted_by_a_resume(steered, say):
    bench = steered()
    train(bench, say, 1, a=2, b=2)
    bench.take(command(1, **{LAST: 9}))
    assert find_reached_limits(job(), state(bench).changes, {"main": 9})
    tree = msgspec.to_builtins(job())
    tree["policies"]["main"]["train"]["max_steps"] = 9
    file = SwarmJob.build(tree)
    assert not find_reached_limits(file, state(bench).changes, {"main": 9}), "the file was edited since"
    (change,) = state(bench).changes
    later = msgspec.structs.replace(change, base=9, before=9, value=12)
    assert not find_reached_limits(file, [later], {"main": 12}), "the file's own last step is over, too"
    assert find_reached_limits(job(), [change], {"main": 8}) == []


def test_a_paused_run_issues_no_tickets_until_it_is_resumed(steered, say):
    bench = steered()
    issued = bench.tickets
    bench.take(command(1, "pause"))
    train(bench, say, 1, a=2, b=2)
    assert bench.tickets == issued
    bench.restart()
    bench.settle()
    assert bench.tickets == issued, "a restart forgets no pause"
    bench.take(command(2, "resume"))
    assert sum(bench.tickets.values()) == sum(issued.values()) + 4


def test_a_drained_run_says_when_nothing_is_under_way(steered, say):
    bench = steered()
    bench.take(say.begin("e", kind="a", ticket_id="a.1"), command(1, "drain"))
    bench.wait(1)
    assert [fields["state"] for fields in bench.events("control")] == ["accepted"]
    bench.take(say.end(status="failed"))
    bench.wait(1)
    bench.wait(1)
    assert [fields["state"] for fields in bench.events("control")] == ["accepted", "drained"]
    bench.restart()
    assert state_fields(bench.core)["pace"] == "draining"
    bench.wait(1)
    assert state_fields(bench.core)["pace"] == "drained"
    bench.take(command(2, "resume"))
    bench.wait(1)
    assert state_fields(bench.core)["pace"] == "running"


def test_a_new_mix_holds_from_the_first_batch_without_a_ticket(steered, say):
    """Within the staleness bound, and at the same batch in collector and learner."""
    bench = steered()
    assert bench.tickets == {"a": 4, "b": 4}
    bench.take(command(1, mix={"a": 0.25, "b": 0.75}))
    (change,) = [c for c in state(bench).changes if c.path == "mix"]
    assert (change.from_grant, change.from_step) == (3, {"main": 3})
    train(bench, say, 1, a=2, b=2)
    assert bench.tickets == {"a": 5, "b": 7}
    train(bench, say, 2, a=2, b=2)
    assert bench.tickets == {"a": 6, "b": 10}


def test_a_kind_can_join_and_leave_the_mix(steered, say):
    bench = steered()
    bench.take(command(1, mix={"a": 0.5, "c": 0.5}))
    train(bench, say, 1, a=2, b=2)
    assert bench.tickets == {"a": 6, "b": 4, "c": 2}


def test_a_dry_kind_lends_its_share_until_it_is_back(steered, say):
    bench = steered(when_dry="lend", dry_after_s=60.0)
    train(bench, say, 1, a=2, b=2)  # b's clients die; tickets of both kinds are out
    bench.take(say.begin("x", "x", kind="a", ticket_id=min(bench.core.tickets.out["a"])))
    bench.wait(30)
    bench.wait(60)
    assert state(bench).lent == ("b",)
    assert any("kind b has run dry" in w["text"] and "lent" in w["text"] for w in bench.events("warning"))
    before = bench.tickets["a"]
    bench.settle()
    assert bench.tickets["a"] > before - 1
    bench.restart()
    assert bench.core.tickets.lent == {"b"}
    granted_a = bench.tickets["a"]
    train(bench, say, 2, a=2)
    assert bench.tickets["a"] > granted_a, "the others go on"
    issued_b = bench.tickets["b"]
    bench.take(say.begin("back", "back", kind="b", ticket_id=min(bench.core.tickets.out["b"])))
    bench.wait(1)
    assert state(bench).lent == ()
    assert any("kind b is back" in w["text"] for w in bench.events("warning"))
    assert {w["kind"] for w in bench.events("warning")} == {"stall"}, "of no interest once the run has been stopped"
    assert bench.tickets["b"] == issued_b


def test_a_dry_kind_that_is_waited_for_is_said_once(steered, say):
    bench = steered(when_dry="wait", dry_after_s=60.0)
    bench.take(say.begin("x", "x", kind="a", ticket_id="a.1"))
    for _ in range(5):
        bench.wait(30)
    texts = [w["text"] for w in bench.events("warning") if "kind b has run dry" in w["text"]]
    assert len(texts) == 1
    assert "when_dry" in texts[0]
    assert state(bench).lent == ()


def test_of_a_kind_without_others_nothing_is_said_of_lending(steered, say):
    bench = steered(when_dry="wait", dry_after_s=60.0)
    bench.take(command(1, mix={"a": 1.0}))
    for version in range(1, 4):
        flat(bench, say, "a", groups=4)
        train(bench, say, version, a=4)
    for _ in range(5):
        bench.wait(30)
    texts = [w["text"] for w in bench.events("warning") if "kind a has run dry" in w["text"]]
    assert [text.endswith("batches wait for it") for text in texts] == [True], texts


def flat(bench, say, *kinds: str, groups: int) -> None:
    """So many groups of each kind, attempted and dropped for equal rewards."""
    for _ in range(groups):
        names = []
        for kind in kinds:
            ticket = min(bench.core.tickets.out[kind], key=lambda t: int(t.split(".")[1]))
            bench.take(
                say.begin(ticket, ticket, kind=kind, ticket_id=ticket), say.turn(episode=ticket), say.end(ticket)
            )
            names.append(ticket)
        version = bench.core.run.versions["main"]
        bench.take(say.consumed(version=version, dropped=dict.fromkeys(names, "equal_rewards")))


def test_a_kind_whose_groups_teach_nothing_lends_its_share_until_they_do_again(steered, say):
    bench = steered(when_dry="lend", uninformative_groups=3)  # of each batch, two groups are b's
    train(bench, say, 1, a=2, b=2)
    flat(bench, say, "b", groups=5)
    bench.wait(1)
    assert state(bench).lent == ()
    flat(bench, say, "b", groups=1)
    bench.wait(1)
    assert state(bench).lent == ("b",)
    for version in range(2, 8):  # one in four
        before = bench.tickets
        train(bench, say, version, a=3, b=1)
        flat(bench, say, "b", groups=3)
        bench.wait(1)
        assert bench.tickets["a"] - before["a"] >= 3, "the others go on, with its share"
        assert bench.tickets["b"] - before["b"] == 4, "and it is attempted as before"
        assert state(bench).lent == ("b",)
    for version in range(8, 14):
        train(bench, say, version, a=2, b=2)
        bench.wait(1)
    assert state(bench).lent == ()
    (told,) = [w["text"] for w in bench.events("warning")]
    assert told.startswith(
        "kind b teaches nothing now: rewards were equal in each of its last 6 groups; its share is lent"
    )


def test_a_kind_that_teaches_is_not_lent_however_many_of_its_groups_were_equal_in_between(steered, say):
    bench = steered(when_dry="lend", uninformative_groups=3)
    for version in range(1, 5):
        flat(bench, say, "a", "b", groups=5)
        train(bench, say, version, a=2, b=2)
        bench.wait(1)
    assert state(bench).lent == ()
    assert not bench.events("warning")


def test_a_kind_that_teaches_nothing_is_waited_for_where_that_is_asked_and_said_once(steered, say):
    bench = steered(when_dry="wait", uninformative_groups=1)
    for version in range(1, 5):
        flat(bench, say, "b", groups=4)
        bench.wait(1)
        train(bench, say, version, a=2, b=2)
        bench.wait(1)
    assert state(bench).lent == ()
    (told,) = [w["text"] for w in bench.events("warning")]
    assert "batches wait for it (groups.when_dry = 'lend'" in told


def test_where_no_kind_teaches_anything_nothing_is_lent(steered, say):
    bench = steered(when_dry="lend", uninformative_groups=1)
    flat(bench, say, "a", "b", groups=4)
    bench.wait(1)
    assert state(bench).lent == ()
    assert all("batches wait for it" in w["text"] for w in bench.events("warning"))


def test_a_run_without_any_client_lends_nothing(steered):
    bench = steered(when_dry="lend", dry_after_s=60.0)
    for _ in range(5):
        bench.wait(30)
    assert state(bench).lent == ()


def test_another_group_size_counts_from_the_next_tickets_on(steered, say):
    bench = steered()
    bench.take(command(1, **{"kinds.a.group_size": 3}))
    assert bench.core.rules.size_of("a") == 3
    assert bench.tickets == {"a": 12, "b": 4}
