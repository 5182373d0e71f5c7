"""Trainings are compared after the same episodes and after the same seconds, beside the staleness that they really had."""

from benchmarks.staleness import Trained, compare, summarise


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
