"""Fractional factorial designs: balanced, orthogonal, and as good as the textbook's."""

import itertools

import numpy as np
import pytest

from support.studies import FIRST, Story, make_trial, study_of
from swarmq.studies.analysis import main_effects
from swarmq.studies.design import choose_arms, plan_next
from swarmq.studies.factorial import fractional


@pytest.mark.parametrize(
    ("factors", "arms"), [(2, 4), (3, 4), (4, 8), (5, 8), (7, 8), (5, 16), (6, 16), (15, 16), (9, 32)]
)
def test_columns_are_balanced_and_orthogonal(factors, arms):
    signs = 2 * np.array(fractional(factors, arms)) - 1
    assert signs.shape == (arms, factors)
    assert (signs.T @ signs == arms * np.eye(factors)).all()
    assert (signs.sum(0) == 0).all()
    assert (signs[0] == -1).all()
    assert len({tuple(row) for row in signs}) == arms


def test_four_factors_in_eight_arms_mix_no_effect_with_an_interaction_of_two():
    """Resolution IV, the best there is (Box, Hunter, Hunter, table 6.22)."""
    signs = 2 * np.array(fractional(4, 8)) - 1
    for one, (left, right) in itertools.product(range(4), itertools.combinations(range(4), 2)):
        if one not in (left, right):
            assert signs[:, one] @ (signs[:, left] * signs[:, right]) == 0


@pytest.mark.parametrize(("factors", "arms"), [(3, 6), (4, 4), (3, 16), (2, 0)])
def test_a_number_of_arms_that_makes_no_design_is_refused(factors, arms):
    with pytest.raises(ValueError, match="need a power of two"):
        fractional(factors, arms)


SPACE = {name: {"values": [0, 1]} for name in ("p", "q", "r")}


def space_study(**changes):
    study = {key: value for key, value in FIRST.items() if key != "arms"}
    import msgspec

    from swarmq.studies.study import Study

    return msgspec.convert(study | {"space": SPACE, "design": {"kind": "fractional", "num_arms": 4}} | changes, Study)


def test_a_study_runs_the_arms_of_its_design():
    study = space_study()
    arms = choose_arms(study)
    assert [tuple(arm.settings.values()) for arm in arms.values()] == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    assert len(plan_next(Story(study).state, make_trial(study))) == 4 * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"design": {"kind": "fractional", "num_arms": 3}},
        {"space": SPACE | {"s": {"values": [1, 2, 3]}}, "design": {"kind": "fractional", "num_arms": 8}},
        {"space": SPACE | {"s": {"low": 0, "high": 1}}, "design": {"kind": "fractional", "num_arms": 8}},
    ],
)
def test_a_study_without_two_levels_or_with_other_numbers_of_arms_is_refused(changes):
    with pytest.raises(ValueError, match=r"design\.num_arms|space\.s"):
        space_study(**changes)


def test_main_effects_are_the_differences_of_levels_seed_by_seed():
    study = space_study()
    story = Story(study)
    for fact in plan_next(story.state, make_trial(study)):
        story.add(fact)
        values = fact.trial.settings
        noise = np.random.default_rng([fact.trial.seed, *values.values()]).normal(0, 0.01)
        story.finish(fact.trial, 2 * values["p"] - values["q"] + fact.trial.seed + noise)
    results = [(one.trial, one.result) for one in story.state.trials.values()]
    effects = {effect.factor: effect for effect in main_effects(study, results)}
    assert effects["p"].mean == pytest.approx(2, abs=0.05)
    assert effects["q"].mean == pytest.approx(-1, abs=0.05)
    assert effects["r"].interval.low < 0 < effects["r"].interval.high or abs(effects["r"].mean) < 0.05
    assert effects["p"].p_holm < 0.05
    assert effects["p"].seeds == 3
    assert main_effects(study_of(), []) == []
