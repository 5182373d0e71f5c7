"""Evaluation while training: rounds on their own queue, never trained, told with honest intervals."""

from __future__ import annotations

import msgspec
import pytest

from swarmq.broker import topology
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.evals import pass_at
from swarmq.collector.service import build_eval_task
from swarmq.config import Eval
from swarmq.messages import EpisodeBegin, Slot, Task, decode


def eval_task(name: str, repeats: int = 2, kind: str = "math", **fields) -> Task:
    given = {"mode": "eval", "payload": msgspec.Raw(msgspec.msgpack.encode({"question": name})), **fields}
    return Task(run="r", slot=Slot(task_id=name), kind=kind, group_size=repeats, **given)


@pytest.fixture
def bench(make_bench):
    return make_bench(eval=Eval(every=2, k=(1, 2), deadline_s=500.0))


def issued(bench) -> list[do.IssueEval]:
    return [effect for effect in bench.effects if isinstance(effect, do.IssueEval)]


def begin(bench, say, item: do.IssueEval, number: int = 0) -> str:
    """The episode that somebody begins at an attempt of a round."""
    slot = msgspec.msgpack.decode(item.slot, type=Slot)
    begin = EpisodeBegin(
        run="r",
        episode_id=f"e{number}-{slot.id}",
        slot=slot,
        kind=item.kind,
        group_size=1,
        policies=("main",),
        mode="eval",
        client_id="c",
    )
    bench.take(begin, say.turn(episode=begin.episode_id, mode="eval"))
    return begin.episode_id


def attempt(bench, say, item: do.IssueEval, number: int = 0, **end) -> None:
    bench.take(say.end(begin(bench, say, item, number), **{"reward": 0.0, **end}))


def fail(bench, say, item: do.IssueEval, number: int = 0, *, final: bool = True) -> None:
    attempt(bench, say, item, number, status="failed", final=final)


def step(bench, say, version: int) -> None:
    name = f"t{version}"
    bench.take(say.begin(name, name), say.turn(episode=name), say.end(name), say.consumed(name, version=version))
    bench.wait(1)


def test_a_round_is_held_before_the_first_step_and_every_n_steps(bench, say):
    bench.take(eval_task("a"), eval_task("b"))
    bench.wait(1)
    assert [item.version for item in issued(bench)] == [0] * 4
    message = build_eval_task(bench.store, issued(bench)[0], run="r")
    assert (message.mode, msgspec.msgpack.decode(message.payload)) == ("eval", {"question": "a"})
    for item in issued(bench):
        attempt(bench, say, item, success=True)
    step(bench, say, 1)
    assert len(issued(bench)) == 4
    step(bench, say, 2)
    assert [item.version for item in issued(bench)[4:]] == [2] * 4


@pytest.mark.parametrize(("every", "due"), [(1, 3), (3, 3), (4, 4), (5, 5)])
def test_another_number_of_steps_counts_from_the_newest_round(bench, say, every, due):
    bench.take(eval_task("a"))
    bench.wait(1)
    for version in range(1, 8):
        for item in issued(bench)[-2:]:
            attempt(bench, say, item, number=version)
        if version == 3:
            bench.core.run.rules = msgspec.structs.replace(
                bench.core.rules, eval=Eval(every=every)
            )  # as `swarmq set` does
        step(bench, say, version)
    versions = [item.version for item in issued(bench)[::2]]
    assert versions[:2] == [0, 2]
    assert versions[2] == due
    assert len(set(versions)) == len(versions), "two rounds at one version have the same slots"
    assert versions[2:] == [version for version in range(3, 8) if version % every == 0]


def test_pass_at_k_is_told_by_kind_and_what_is_missing_is_no_failure(bench, say):
    bench.take(eval_task("a"), eval_task("b"), eval_task("c", kind="code"))
    bench.wait(1)
    for item in issued(bench):
        if item.kind == "math":
            attempt(bench, say, item, success="a/" in item.slot_id, reward=0.25)
    assert not bench.events("evaluated"), "code has not come yet"
    bench.wait(500)
    (told,) = bench.events("evaluated")
    assert (told["version"], told["missing"]) == (0, 2)
    math = told["kinds"]["math"]
    assert (math["tasks"], math["episodes"], math["reward"]) == (2, 4, 0.25)
    assert math["pass"]["1"]["value"] == math["pass"]["2"]["value"] == 0.5
    assert math["pass"]["1"]["low"] < 0.5 < math["pass"]["1"]["high"]
    assert told["kinds"]["code"] == {"tasks": 0, "episodes": 0, "reward": None, "pass": {}, "metrics": {}}


def test_a_round_survives_a_restart_and_counts_each_attempt_once(bench, say):
    bench.take(eval_task("a"))
    bench.wait(1)
    first, second = issued(bench)
    attempt(bench, say, first, success=True)
    bench.restart()
    assert bench.store.outbox()[-2:] == [first, second] or second in bench.store.outbox()
    bench.run(bench.core.confirm_eval(second.slot_id))
    assert second not in bench.store.outbox()
    attempt(bench, say, second, success=False)
    bench.wait(1)
    (told,) = bench.events("evaluated")
    assert told["kinds"]["math"]["pass"]["1"]["value"] == 0.5


@pytest.fixture(params=["at once", "restarted"])
def tick(bench, request):
    """A second passes, in which the collector may have been killed before and after."""

    def pass_by():
        bench.restart() if request.param == "restarted" else None
        bench.wait(1)
        bench.restart() if request.param == "restarted" else None

    return pass_by


@pytest.fixture
def round_of(bench):
    """A round that is under way."""

    def hold(*names: str, **fields) -> list[do.IssueEval]:
        bench.take(*(eval_task(name, **fields) for name in names))
        bench.wait(1)
        return issued(bench)

    return hold


def test_a_round_is_closed_at_once_without_what_is_given_up_which_is_no_failure(bench, say, tick, round_of):
    right, hopeless, wrong, right_too = round_of("a", "b")
    attempt(bench, say, right, success=True, reward=1.0)
    fail(bench, say, hopeless)
    attempt(bench, say, wrong, success=False)
    tick()
    assert not bench.events("evaluated"), "one has not come yet"
    attempt(bench, say, right_too, success=True, reward=1.0)
    tick()
    (told,) = bench.events("evaluated")
    assert (told["missing"], told["given_up"]) == (0, 1)
    math = told["kinds"]["math"]
    assert (math["tasks"], math["episodes"], math["reward"]) == (2, 3, 2 / 3)
    assert math["pass"]["1"]["value"] == (0.5 + 1.0) / 2
    assert math["pass"]["2"]["tasks"] == 1, "of the other only one attempt has a result"


def test_a_round_of_which_all_is_given_up_is_closed_and_leaves_nothing_behind(bench, say, tick, round_of):
    for item in round_of("a"):
        fail(bench, say, item)
    tick()
    (told,) = bench.events("evaluated")
    assert (told["missing"], told["given_up"]) == (0, 2)
    assert told["kinds"]["math"] == {"tasks": 0, "episodes": 0, "reward": None, "pass": {}, "metrics": {}}
    assert not bench.store.snapshot().evals.slots
    assert bench.core.counts["eval_given_up"] == 2


def test_an_attempt_that_will_be_tried_again_is_waited_for_until_the_deadline(bench, say, tick, round_of):
    first, second = round_of("a")
    fail(bench, say, first)
    fail(bench, say, second, final=False)
    tick()
    assert not bench.events("evaluated")
    bench.wait(500)
    (told,) = bench.events("evaluated")
    assert (told["missing"], told["given_up"]) == (1, 1)


def test_a_result_of_what_is_given_up_counts_while_the_round_lasts(bench, say, tick, round_of):
    first, second = round_of("a")
    fail(bench, say, first)
    tick()
    attempt(bench, say, first, number=1, success=True)
    fail(bench, say, first, number=2)
    begin(bench, say, first, number=3)
    tick()
    attempt(bench, say, second, success=True)
    tick()
    (told,) = bench.events("evaluated")
    assert (told["missing"], told["given_up"]) == (0, 0)
    assert bench.core.counts["eval_given_up"] == 1
    assert told["kinds"]["math"]["pass"]["2"]["value"] == 1.0


@pytest.mark.parametrize("ending", ["finishes", "fails", "falls silent"])
def test_another_try_at_what_is_given_up_is_waited_for(bench, say, tick, round_of, ending):
    (only,) = round_of("a", repeats=1)
    twin = begin(bench, say, only, number=1)
    fail(bench, say, only)
    tick()
    assert not bench.events("evaluated"), "somebody is still at it"
    if ending == "falls silent":
        bench.core.run.rules = bench.rules = msgspec.structs.replace(bench.rules, idle_timeout_s=100.0)
        bench.wait(100)
    else:
        bench.take(say.end(twin, "finished" if ending == "finishes" else "failed"))
        tick()
    (told,) = bench.events("evaluated")
    assert (told["missing"], told["given_up"]) == (0, 0 if ending == "finishes" else 1)


def test_what_is_given_up_too_late_is_not_given_up_in_the_next_round(bench, say, round_of):
    (only,) = round_of("a", repeats=1)
    bench.wait(500)
    assert bench.events("evaluated")[0]["missing"] == 1
    step(bench, say, 1)
    step(bench, say, 2)
    fail(bench, say, only)
    bench.wait(1)
    assert len(bench.events("evaluated")) == 1
    assert bench.core.counts["eval_given_up"] == 0


def test_of_a_deleted_queue_what_is_given_up_is_not_sent_again(bench, say, round_of):
    done, hopeless, open_ = round_of("a", repeats=3)
    attempt(bench, say, done)
    fail(bench, say, hopeless)
    again = bench.core.resend_lost({topology.evals("r", "math")})
    assert [effect.slot_id for effect in again] == [open_.slot_id]


def test_evaluation_is_never_trained_and_takes_no_credit(bench, say):
    tickets = bench.tickets
    bench.take(eval_task("a"))
    bench.wait(1)
    for item in issued(bench):
        attempt(bench, say, item, success=True)
    assert not bench.sent
    assert bench.tickets == tickets


def test_rounds_never_pile_up(bench, say):
    bench.take(eval_task("a"))
    bench.wait(1)
    for version in range(1, 8):
        step(bench, say, version)
    assert {item.version for item in issued(bench)} == {0}, "nobody evaluates: no further round begins"


def test_metrics_are_means_over_the_attempts_that_report_them_also_after_a_restart(bench, say):
    bench.take(eval_task("a"), eval_task("c", 1, kind="code"))
    bench.wait(1)
    first, third, second = issued(bench)
    attempt(bench, say, first, metrics={"calls": 4.0, "n" * 200: 1.0})
    bench.restart()
    attempt(bench, say, second, metrics={"calls": 1.0})
    attempt(bench, say, third)
    bench.wait(1)
    (told,) = bench.events("evaluated")
    (long,) = told["kinds"]["math"]["metrics"].keys() - {"calls"}
    assert told["kinds"]["math"]["metrics"] == {"calls": 2.5, long: 1.0}
    assert len(long) == 80
    assert told["kinds"]["code"]["metrics"] == {}


def test_metrics_beyond_64_of_a_kind_are_left_out_and_it_is_said_once(bench, say):
    bench.take(eval_task("a"))
    bench.wait(1)
    for version in (0, 2):
        for number, item in enumerate(issued(bench)[-2:]):
            names = range(40 * number, 40 * number + 60)
            attempt(bench, say, item, number=version, metrics={f"m{name:03d}": 1.0 for name in names})
        step(bench, say, version + 1)
        step(bench, say, version + 2)
    for told in bench.events("evaluated"):
        metrics = told["kinds"]["math"]["metrics"]
        assert len(metrics) == 64
        assert metrics.keys() >= {f"m{name:03d}" for name in range(40, 60)}, "those of both attempts"
    (warning,) = (one["text"] for one in bench.events("warning") if "metrics" in one["text"])
    assert "evaluation: episodes of kind math report more than 64" in warning


def test_the_results_of_a_round_wait_for_each_learner_until_the_broker_has_them(bench, say):
    bench.take(eval_task("a", 1))
    bench.wait(1)
    attempt(bench, say, issued(bench)[0], reward=0.5)
    bench.wait(1)
    bench.restart()
    (waiting,) = (one for one in bench.store.outbox() if isinstance(one, do.SendEvaluation))
    message = decode(waiting.body)
    assert (waiting.policy, waiting.began_at, message.version) == ("main", message.began_at, 0)
    assert message.results == bench.events("evaluated")[0]
    bench.run(bench.core.confirm_evaluation(waiting.policy, waiting.began_at))
    assert not any(isinstance(one, do.SendEvaluation) for one in bench.store.outbox())


def test_a_training_task_is_not_kept_for_evaluation(bench):
    assert isinstance(bench.core.take(eval_task("a", mode="train"), b"", 0.0)[0], do.SendDeadLetter)


@pytest.mark.parametrize(
    ("k", "n", "right", "chance"), [(1, 4, 1, 0.25), (2, 4, 1, 0.5), (2, 2, 0, 0.0), (3, 4, 2, 1.0)]
)
def test_pass_at_k_is_unbiased(k, n, right, chance):
    assert pass_at(k, n, right) == pytest.approx(chance)
