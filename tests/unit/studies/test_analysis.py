"""What results of a study say: its power before and after the A/A trials, and a look at it."""

import msgspec
import numpy as np

from swarmq.studies.analysis import announce_power, collect_scores, compare, look, measure_noise
from swarmq.studies.records import Spending, Trial, TrialResult
from swarmq.studies.study import Study

FILE = {
    "name": "losses",
    "question": "Which loss?",
    "metric": {"name": "held_out"},
    "smallest_effect": 0.1,
    "trial": {"function": "toy:train", "max_seconds": 5},
    "arms": {"gspo": {}, "cispo": {}},
    "seeds": list(range(8)),
    "noise_trials": 6,
    "budget": {"trials": 100},
}


def study(**changes):
    return msgspec.convert(FILE | changes, Study)


def results(shifts, seeds=range(8), sd=0.02, rung=0, purpose="compare"):
    rng = np.random.default_rng(rung)
    return [
        (
            Trial(id=f"{arm}{seed}{rung}", arm=arm, seed=seed, settings={}, lineage="", rung=rung, purpose=purpose),
            TrialResult(trial_id="", fence=1, metrics={"held_out": sum(scores) / 2}, scores=dict(zip("ab", scores, strict=True)), cost=Spending()),
        )
        for arm, shift in shifts.items()
        for seed in seeds
        for scores in [(0.5 + shift + rng.normal(0, sd, 2)).tolist()]
    ]  # fmt: skip


AA = results({"gspo": 0.0}, range(100, 106), purpose="noise")


def test_power_is_announced_before_any_trial_as_the_noise_that_it_bears():
    assert "if a paired difference has an SD of at most 0.0865; its 6 A/A trials will measure it" in announce_power(
        study()
    )
    assert "set noise_trials to measure it" in announce_power(study(noise_trials=0))
    assert "set noise_trials to 2 or more to measure it" in announce_power(study(noise_trials=1))
    assert "needs at least two" in announce_power(study(seeds=[1]))


def test_power_counts_the_arms_that_a_planner_or_a_space_may_add():
    three = study(arms={"a": {}, "b": {"settings": {"x": 1}}, "c": {"settings": {"x": 2}}})
    planner = {"kind": "endpoint", "model": "m", "max_arms": 1}
    space = {"x": {"values": [0, 1, 2]}}
    expected = announce_power(three)
    assert expected != announce_power(study())
    assert announce_power(study(planner=planner)) == expected
    assert (
        announce_power(msgspec.convert({k: v for k, v in FILE.items() if k != "arms"} | {"space": space}, Study))
        == expected
    )


def test_power_is_announced_again_after_the_noise_is_known():
    assert announce_power(study(), AA).startswith("8 seeds find an effect of 0.1 with probability 1.00; enough.")
    noisy = results({"gspo": 0.0}, range(100, 106), sd=0.3, purpose="noise")
    assert "would be enough" in announce_power(study(), noisy)
    assert "with probability 0.99" in announce_power(
        study(stopping={"kind": "anytime"}, design={"kind": "sequential"}), AA
    )


def test_a_look_stops_when_every_arm_is_decided():
    found = results({"gspo": 0.0, "cispo": 0.3})
    figures, decision, reason = look(study(stopping={"kind": "anytime"}, design={"kind": "sequential"}), found)
    assert (decision, reason) == ("stop", "cispo: better")
    assert figures["cispo.low"] > 0.1
    assert figures["cispo.seeds"] == 8
    _, decision, reason = look(
        study(stopping={"kind": "anytime"}, design={"kind": "sequential"}), [pair for pair in found if pair[0].seed < 3]
    )
    assert (decision, reason) == ("continue", "undecided: cispo")
    assert look(study(), [])[1] == "continue"


def test_comparisons_take_tasks_in_pairs_and_leave_aa_trials_and_lower_rungs_out():
    everything = [*AA, *results({"gspo": 0.0, "cispo": -0.5}), *results({"gspo": 0.0, "cispo": 0.3}, [0, 1, 2], rung=1)]
    (found,) = compare(study(), everything[::-1])
    assert (found.seeds, found.tasks, found.verdict) == ([0, 1, 2], 2, "better")
    assert measure_noise(study(), everything).dof == 5
    assert compare(study(), everything) == [found], "the order of results changes nothing"


def test_scores_that_are_not_the_metric_are_not_compared_in_its_place():
    (trial, result), *_ = results({"gspo": 0.0})
    other = msgspec.structs.replace(result, metrics={"held_out": 0.9})
    assert collect_scores(study(), [(trial, other)]) == {"gspo": {0: {"held_out": 0.9}}, "cispo": {}}


def test_arms_that_were_not_promoted_count_in_holms_correction():
    """The best of many arms was chosen among all of them."""
    space = {"lr": {"values": [1, 2, 3, 4, 5, 6]}}
    rungs = {"kind": "halving", "rungs": [1, 2], "num_arms": 6}
    searched = study(arms={}, space=space, design=rungs)
    last = results({"arm-001": 0.0, "arm-004": 0.03}, rung=1)
    (found,) = compare(searched, last)
    assert found.p_holm == 5 * found.p, "five arms are compared with the baseline, four of them without a result here"
