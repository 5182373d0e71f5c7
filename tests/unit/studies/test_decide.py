"""One lease for a trial, one result, and no start beyond the budget, whatever is claimed and reported how often."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.studies import Story, study_of
from swarmq.studies.decide import MAX_LOST, on_claim, on_end, on_loss
from swarmq.studies.leader import describe
from swarmq.studies.records import (
    Spending,
    StudyAmended,
    StudyResumed,
    StudyStopped,
    TrialFailed,
    TrialParked,
    TrialResult,
    TrialStarted,
)
from swarmq.studies.reports import Claim, hash_terms
from swarmq.studies.state import add


def claim(trial, claim_id="c", copy="o", study=None):
    terms = hash_terms(study or study_of(), trial.lineage)
    return Claim(claim_id=claim_id, trial_id=trial.id, copy_id=copy, worker="w:1", terms=terms)


def result(trial, fence, value=1.0, seconds=2.0):
    return TrialResult(trial_id=trial.id, fence=fence, metrics={"score": value}, cost=Spending(gpu_seconds=seconds))


def failure(trial, fence, kind="failure"):
    return TrialFailed(
        trial_id=trial.id, fence=fence, kind=kind, reason="broke", log="the log", cost=Spending(gpu_seconds=2.0)
    )


def decide(story, wanted, elapsed_s=0.0):
    decision = on_claim(story.state, wanted, elapsed_s=elapsed_s)
    story.add(*decision.facts)
    return decision.verdict


def end(story, ended):
    story.add(*on_end(story.state, ended).facts)


def test_a_lease_reserves_its_costs_and_a_result_settles_them():
    story = Story(study_of())
    trial = story.plan()
    assert decide(story, claim(trial)) == "run"
    assert story.state.reserved == Spending(gpu_seconds=10.0)
    end(story, result(trial, story.state.trials[trial.id].fence))
    assert (story.state.reserved, story.state.spent) == (Spending(), Spending(gpu_seconds=2.0))


def test_a_repeated_claim_gets_the_same_lease_and_other_claims_wait_or_are_dropped():
    story = Story(study_of())
    trial = story.plan()
    decide(story, claim(trial))
    before = len(story.entries)
    assert decide(story, claim(trial)) == "run"
    assert decide(story, claim(trial, "other")) == "wait"
    assert decide(story, claim(trial, "other", copy="second offer")) == "drop"
    assert len(story.entries) == before
    end(story, result(trial, story.state.trials[trial.id].fence))
    assert decide(story, claim(trial, "late")) == "drop"


def test_the_result_of_a_lease_that_has_ended_counts_nothing():
    story = Story(study_of())
    trial = story.plan()
    old = story.start(trial)
    story.add(*on_loss(story.state.trials[trial.id], Spending(gpu_seconds=5.0)))
    assert decide(story, claim(trial, "new")) == "run"
    end(story, result(trial, old, value=7.0))
    assert story.state.trials[trial.id].result is None
    new = story.state.trials[trial.id].fence
    end(story, result(trial, new, value=1.0))
    end(story, result(trial, new, value=9.0))
    assert story.state.trials[trial.id].result.metrics == {"score": 1.0}
    assert story.state.spent == Spending(gpu_seconds=7.0)


def test_a_claim_that_the_broker_delivers_again_after_its_lease_has_ended_gets_no_second_one():
    story = Story(study_of())
    trial = story.plan()
    decide(story, claim(trial))
    end(story, failure(trial, story.state.trials[trial.id].fence))
    assert decide(story, claim(trial)) == "drop"
    assert not story.state.leased
    assert decide(story, claim(trial, "new")) == "run"


@pytest.mark.parametrize(
    "other",
    [
        {"trial": {"function": "work:trial", "max_seconds": 90}},
        {"metric": {"name": "other"}},
        {"lease_s": 90.0},
    ],
)
def test_a_worker_with_another_study_file_gets_no_lease(other):
    story = Story(study_of())
    trial = story.plan()
    assert decide(story, claim(trial, study=study_of(**other))) == "differs"
    assert not story.state.leased
    assert decide(story, claim(trial, study=study_of(question="Is b less than a?"))) == "run", "it changes no trial"


def test_a_result_without_the_metric_that_an_amendment_has_named_since_is_a_failure():
    story = Story(study_of())
    trial = story.plan()
    fence = story.start(trial)
    story.add(StudyAmended(study=study_of(metric={"name": "other"}), digest="e", inputs="i", reason="better"))
    end(story, result(trial, fence))
    (failed,) = [entry.fact for entry in story.entries if isinstance(entry.fact, TrialFailed)]
    assert failed.reason == "the trial has returned no 'other', only score"
    assert (story.state.trials[trial.id].result, story.state.spent) == (None, Spending(gpu_seconds=2.0))


def test_the_third_failure_parks_a_trial_with_its_log_and_is_no_result():
    story = Story(study_of())
    trial = story.plan()
    for number in range(3):
        assert decide(story, claim(trial, f"c{number}")) == "run"
        end(story, failure(trial, story.state.trials[trial.id].fence, "timeout" if number else "failure"))
    one = story.state.trials[trial.id]
    assert (one.result, one.parked) == (None, TrialParked(trial_id=trial.id, reason="broke", log="the log"))
    assert decide(story, claim(trial, "c9")) == "drop"


def test_a_failure_is_shown_with_the_last_line_of_its_log():
    story = Story(study_of())
    trial = story.plan()
    failed = failure(trial, 1)
    assert describe(failed, story.state).endswith(f"{trial.arm}, seed {trial.seed}: failure, broke: the log")
    log = "Traceback:\n  ...\nTypeError: no\n"
    assert describe(msgspec.structs.replace(failed, log=log), story.state).endswith("failure, broke: TypeError: no")
    assert describe(msgspec.structs.replace(failed, log=""), story.state).endswith("failure, broke")


def test_a_resumed_study_starts_parked_trials_again():
    story = Story(study_of(max_failures=1))
    trial = story.plan()
    decide(story, claim(trial))
    end(story, failure(trial, story.state.trials[trial.id].fence))
    assert story.state.trials[trial.id].is_settled
    story.add(StudyStopped(kind="complete", reason="done"), StudyResumed(reason="the disk has room again"))
    assert story.state.open == [story.state.trials[trial.id]]
    assert decide(story, claim(trial, "again")) == "run"


def test_lost_and_stopped_workers_park_nothing_until_there_are_very_many():
    story = Story(study_of(budget={"trials": 1000}))
    trial = story.plan()
    for number in range(MAX_LOST):
        assert not story.state.trials[trial.id].parked
        assert decide(story, claim(trial, f"r{number}")) == "run"
        end(story, failure(trial, story.state.trials[trial.id].fence, "returned"))
        assert decide(story, claim(trial, f"c{number}")) == "run"
        story.add(*on_loss(story.state.trials[trial.id], Spending()))
    assert story.state.trials[trial.id].parked


def test_a_study_ends_when_no_trial_fits_the_budget_and_none_runs_that_may_give_some_back():
    story = Story(study_of(budget={"gpu_seconds": 25}))
    one, two, three = (story.plan("a", seed) for seed in range(3))
    assert [decide(story, claim(trial, trial.id)) for trial in (one, two, three)] == ["run", "run", "wait"]
    end(story, result(one, story.state.trials[one.id].fence, seconds=9.0))
    assert decide(story, claim(three, "c3")) == "wait"
    end(story, result(two, story.state.trials[two.id].fence, seconds=9.0))
    assert decide(story, claim(three, "c3")) == "stop"
    assert story.state.stopped.kind == "budget"
    assert "budget.gpu_seconds: another trial may bring it to 28, and the cap is 25" in story.state.stopped.reason


def test_the_time_of_leaders_and_the_number_of_starts_are_capped_too():
    story = Story(study_of(budget={"wall_clock_s": 100}))
    trial = story.plan()
    assert on_claim(story.state, claim(trial), elapsed_s=95.0).verdict == "stop"
    assert on_claim(story.state, claim(trial), elapsed_s=85.0).verdict == "run"
    story = Story(study_of(budget={"trials": 1}))
    story.finish(story.plan(), 1.0)
    assert on_claim(story.state, claim(story.plan("b")), elapsed_s=0.0).verdict == "stop"


def test_a_stopped_study_starts_nothing_and_keeps_the_results_of_running_trials():
    story = Story(study_of())
    running, waiting = story.plan("a"), story.plan("b")
    fence = story.start(running)
    story.add(StudyStopped(kind="asked", reason="enough"))
    assert decide(story, claim(waiting)) == "stop"
    end(story, result(running, fence))
    assert story.state.trials[running.id].result


@given(st.data())
def test_no_order_of_claims_losses_and_reports_counts_a_trial_twice_or_exceeds_the_budget(data):
    cap = data.draw(st.integers(10, 60))
    story = Story(study_of(budget={"gpu_seconds": cap}))
    trials = [story.plan(arm, seed) for arm in "ab" for seed in range(2)]
    fences: list[tuple] = []
    for step in range(data.draw(st.integers(1, 30))):
        trial = data.draw(st.sampled_from(trials))
        one = story.state.trials[trial.id]
        match data.draw(st.sampled_from(["claim", "result", "failure", "loss"])):
            case "claim":
                decide(story, claim(trial, f"c{step}", data.draw(st.sampled_from("op"))))
                if one.lease:
                    fences.append((trial, one.fence))
            case "loss" if one.lease:
                story.add(*on_loss(one, one.lease.reserved))
            case "result" if fences:
                end(story, result(*data.draw(st.sampled_from(fences)), seconds=data.draw(st.floats(0, 10))))
            case "failure" if fences:
                end(story, failure(*data.draw(st.sampled_from(fences))))
        assert add(story.state.spent, story.state.reserved).gpu_seconds <= cap
    facts = [entry.fact for entry in story.entries]
    results = [fact.trial_id for fact in facts if isinstance(fact, TrialResult)]
    assert len(results) == len(set(results))
    starts = sum(isinstance(fact, TrialStarted) for fact in facts)
    ends = sum(isinstance(fact, TrialResult | TrialFailed) for fact in facts)
    assert starts == ends + len(story.state.leased)
