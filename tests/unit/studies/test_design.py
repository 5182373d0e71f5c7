"""A design plans each trial once, from the ledger alone, and its rungs promote the best arms."""

import pytest

from support.studies import Story, make_trial, study_of
from swarmq.studies.design import choose_arms, look_next, plan_next
from swarmq.studies.records import Promoted, StudyAmended, TrialParked, TrialPlanned

FOUR = {name: {"settings": {"arm": number}} for number, name in enumerate("abcd")}
RUNGS = [2, 4, 8]


def advance(story):
    """Let the design go on, and return (arm, seed, steps) of the trials that it adds."""
    facts = plan_next(story.state, make_trial(story.study))
    story.add(*facts)
    return [(f.trial.arm, f.trial.seed, f.trial.steps) for f in facts if isinstance(f, TrialPlanned)]


def finish(story, arm, value, *, rung=0):
    for one in list(story.state.trials.values()):
        if (one.trial.arm, one.trial.rung, one.is_settled) == (arm, rung, False):
            story.finish(one.trial, value)


def test_a_grid_plans_every_arm_with_every_seed_once():
    story = Story(study_of())
    assert len(advance(story)) == 6
    assert advance(story) == []


def test_the_combinations_of_a_space_are_arms():
    space = {"x": {"values": [1, 2]}, "y": {"values": ["u", "v"]}}
    arms = choose_arms(study_of(arms={}, space=space))
    assert [arm.settings for arm in arms.values()] == [{"x": x, "y": y} for x in (1, 2) for y in ("u", "v")]


def test_random_draws_are_within_the_space_and_the_same_every_time():
    space = {"x": {"low": 1e-4, "high": 1e-1, "log": True}, "n": {"low": 1, "high": 9, "whole": True}}
    study = study_of(arms={}, space=space, design={"kind": "random", "num_arms": 20})
    arms = choose_arms(study)
    assert arms == choose_arms(study)
    assert len({arm.settings["x"] for arm in arms.values()}) == 20
    for arm in arms.values():
        assert 1e-4 <= arm.settings["x"] <= 1e-1
        assert arm.settings["n"] in range(1, 10)


def test_an_amended_arm_is_planned_anew_and_has_its_results_back_when_the_amendment_is_taken_back():
    story = Story(study_of(seeds=[0]))
    first, arms = story.study, story.study.arms
    advance(story)
    finish(story, "a", 1.0)
    finish(story, "b", 2.0)
    for arm, planned, counted in (
        ({"settings": {"arm": 9}}, [("b", 0, 0)], ["a"]),
        (arms["b"], [("b", 0, 0)], ["a", "b"]),
    ):
        study = study_of(seeds=[0], arms={"a": arms["a"], "b": arm})
        story.study = study
        story.add(StudyAmended(study=study, digest="e", inputs="i", reason="another b"))
        assert advance(story) == planned
        assert advance(story) == []
        assert [trial.arm for trial, _ in story.state.results] == counted
    assert story.study == first
    assert [result.metrics["score"] for _, result in story.state.results] == [1.0, 2.0]


def test_draws_that_are_equal_are_one_arm():
    design = {"kind": "random", "num_arms": 3}
    story = Story(study_of(arms={}, seeds=[0], space={"x": {"values": [1]}}, design=design))
    assert advance(story) == [("arm-001", 0, 0)]
    assert advance(story) == []


def test_a_sequential_design_waits_for_each_seed():
    story = Story(study_of(design={"kind": "sequential"}))
    assert [seed for _, seed, _ in advance(story)] == [0, 0]
    finish(story, "a", 1.0)
    assert advance(story) == []
    finish(story, "b", 1.0)
    assert [seed for _, seed, _ in advance(story)] == [1, 1]


def test_the_baseline_runs_against_itself_with_seeds_that_no_arm_has():
    story = Story(study_of(noise_trials=2))
    advance(story)
    noise = [one.trial for one in story.state.trials.values() if one.trial.purpose == "noise"]
    assert [(trial.arm, trial.seed) for trial in noise] == [("a", 3), ("a", 4)]
    more = study_of(noise_trials=3, seeds=[0, 1, 2, 3])
    story.add(StudyAmended(study=more, digest="e", inputs="i", reason="more seeds"))
    noise = [fact.trial.seed for fact in plan_next(story.state, make_trial(more)) if fact.trial.purpose == "noise"]
    assert noise == [5], "what is there already is not made again"


def test_halving_promotes_the_best_half_of_a_complete_rung_in_the_same_folder():
    story = Story(study_of(arms=FOUR, seeds=[0], design={"kind": "halving", "rungs": RUNGS}))
    assert {steps for _, _, steps in advance(story)} == {2}
    for arm, value in zip("abc", (1.0, 4.0, 3.0), strict=True):
        finish(story, arm, value)
        assert advance(story) == []
    finish(story, "d", 2.0)
    assert advance(story) == [("b", 0, 4), ("c", 0, 4), ("a", 0, 4)], "the baseline goes along"
    first, second = (one.trial for one in story.state.trials.values() if one.trial.arm == "b")
    assert first.lineage == second.lineage
    assert first.id != second.id
    finish(story, "b", 1.0, rung=1)
    finish(story, "c", 5.0, rung=1)
    finish(story, "a", 0.0, rung=1)
    assert advance(story) == [("c", 0, 8), ("b", 0, 8), ("a", 0, 8)]
    for arm in "abc":
        finish(story, arm, 6.0, rung=2)
    assert advance(story) == []
    assert [(p.arm, p.rung, p.rank) for p in story.state.promoted if p.arm != "a"] == [
        ("b", 1, 1),
        ("c", 1, 2),
        ("c", 2, 1),
        ("b", 2, 2),
    ]


def test_a_metric_to_minimize_promotes_the_smallest_and_a_parked_arm_comes_last():
    design = {"kind": "halving", "rungs": [2, 4]}
    story = Story(study_of(arms=FOUR, seeds=[0], metric={"name": "score", "direction": "minimize"}, design=design))
    advance(story)
    for arm, value in zip("abc", (1.0, 4.0, 3.0), strict=True):
        finish(story, arm, value)
    story.add(TrialParked(trial_id=next(one.trial.id for one in story.state.open), reason="broken"))
    assert [arm for arm, _, _ in advance(story)] == ["a", "c"]


def test_asha_promotes_without_waiting_for_the_whole_rung():
    story = Story(study_of(arms=FOUR, seeds=[0], design={"kind": "asha", "rungs": RUNGS}))
    advance(story)
    finish(story, "a", 1.0)
    assert advance(story) == [("a", 0, 4)], "the baseline goes along"
    finish(story, "b", 2.0)
    assert advance(story) == [("b", 0, 4)]
    finish(story, "c", 1.5)
    assert advance(story) == []
    finish(story, "d", 4.0)
    assert advance(story) == [("d", 0, 4)]
    assert all(isinstance(fact, Promoted) for fact in story.state.promoted)


def test_a_sampler_gets_all_results_and_proposes_the_same_again():
    pytest.importorskip("optuna")
    design = {"kind": "optuna", "num_arms": 12}
    space = {"x": {"low": -1.0, "high": 1.0}}
    stories = [Story(study_of(arms={}, space=space, seeds=[0, 1], design=design)) for _ in range(2)]
    for story in stories:
        while advance(story):
            for one in story.state.open:
                story.finish(one.trial, 1 - (one.trial.settings["x"] - 0.5) ** 2)
    found = [[one.trial.settings["x"] for one in story.state.trials.values()] for story in stories]
    assert len(found[0]) == 24
    assert found[0] == found[1]
    assert max(one.result.metrics["score"] for one in stories[0].state.trials.values()) > 0.95


def test_an_anytime_study_looks_after_each_whole_seed_and_stops_when_all_is_decided():
    pytest.importorskip("scipy")
    changes = {"stopping": {"kind": "anytime", "look_every": 2}, "seeds": list(range(40))}
    story = Story(study_of(design={"kind": "sequential"}, noise_trials=2, **changes))
    while not story.state.stopped and advance(story):
        for one in story.state.open:
            if one.trial.purpose == "noise" and not story.state.looks:
                continue
            story.finish(one.trial, 5.0 * (one.trial.arm == "b") + one.trial.seed / 100)
        story.add(*look_next(story.state))
        assert look_next(story.state) == []
    assert story.state.stopped.kind == "rule"
    assert [look.decision for look in story.state.looks][-1] == "stop"
    assert [look.num_results for look in story.state.looks] == [4 * (n + 1) for n in range(len(story.state.looks))]
    assert len(story.state.trials) < 80, "A/A trials, which end at any time, are not counted"
