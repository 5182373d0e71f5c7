"""Trainings are compared after the same episodes and after the same seconds, beside the staleness that they really had."""

import pytest
from benchmarks.merge import merge
from benchmarks.staleness import Trained, compare, draw, read_runs, summarise


def trained(bound, seed, *, pace, held_out):
    steps = range(1, 11)
    return Trained("tis_mask", bound, seed, held_out, bound / 2, [n / 10 for n in steps], [n * pace for n in steps])


def test_a_slower_training_has_made_fewer_steps_after_equal_seconds():
    trials = [trained(bound, seed, pace=2 if bound == 0 else 1, held_out=0.9) for bound in (0, 4) for seed in (0, 1)]
    at, rows = compare(trials)
    assert at == 10, "when the fastest training ended"
    assert rows["tis_mask", 0].steps == [5, 5]
    assert rows["tis_mask", 4].steps == [10, 10]
    assert rows["tis_mask", 0].equal_seconds[0] < rows["tis_mask", 4].equal_seconds[0]
    figures, _ = summarise(at, rows)
    assert figures["reward_by_bound_0"] == figures["reward_by_bound_4"] == 0.9
    assert figures["staleness_4"] == 2, "a bound is a permission"


def run(bound, seed, *, steps=8):
    """One of `benchmarks.learns`."""
    return {
        "seed": seed,
        "loss": "tis_mask",
        "max_staleness": bound,
        "held_out": {"0": 0.3, "8": 0.9},
        "rewards": [0.5] * steps,
        "staleness": [{"0": 3, str(bound): 1}] * steps,
        "step_seconds": [float(step) for step in range(1, steps + 1)],
    }


def record(*runs, **other):
    told = {"command": "c", "hardware": "h", "date": "2026", "commit": "1", "versions": {}}
    return told | {"figures": {"runs": len(runs)}, "detail": {"runs": list(runs)}} | other


def test_trainings_of_several_gpus_are_compared_together_without_those_that_were_cut_off(tmp_path):
    merged = merge([record(run(4, 0), run(0, 0)), record(run(4, 1), run(0, 1, steps=3))])
    trials = read_runs(merged)
    assert [(one.bound, one.seed) for one in trials] == [(4, 0), (0, 0), (4, 1)]
    assert trials[0].staleness == 1.0
    assert trials[0].seconds == [0, 1, 2, 3, 4, 5, 6, 7], "however late its first batch was"
    at, rows = compare(trials)
    figures, _ = summarise(at, rows, "gpu_")
    assert figures["reward_by_bound_gpu_4"] == 0.9
    draw([("toy", at, rows), ("larger", at, rows)], tmp_path / "both.svg")
    assert (tmp_path / "both.svg").read_text().count("max_staleness") == 4


def test_parts_of_different_commits_make_no_result():
    with pytest.raises(ValueError, match="commit"):
        merge([record(run(0, 0)), record(run(0, 1), commit="2")])
