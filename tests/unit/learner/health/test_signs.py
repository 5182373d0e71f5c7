"""Signs of a training that goes wrong are told while it runs: once, when they begin to show."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from swarmq.learner.health.signs import WINDOW, SignWatch, find_signs

SOUND = {"entropy": 1.0, "kl_k3": 0.001, "truncated": 0.0, "grad_norm": 1.0, "episodes": 8, "dropped": {}}
CUT = SOUND | {"truncated": 0.9}
"""A warning."""
BROKEN = SOUND | {"kl_k3": 9.0}
"""An error."""


def find_warnings(steps: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return (step, sign) of each warning; steps count from 1."""
    lookout = SignWatch()
    return [(number, f.check) for number, fields in enumerate(steps, 1) for f in lookout.step(fields, 4)]


def test_a_sound_training_hears_nothing() -> None:
    assert find_warnings([SOUND] * 50) == []


@pytest.mark.parametrize("steps_before", [WINDOW, 300])
def test_a_sign_is_told_once_while_it_shows(steps_before: int) -> None:
    ((step, sign),) = find_warnings([SOUND] * steps_before + [CUT] * 50)
    assert sign == "truncated answers"
    assert steps_before < step < steps_before + WINDOW


def test_a_critic_that_misleads_or_diverges_is_told() -> None:
    good = SOUND | {"explained_variance": 0.4, "value_loss": 0.1}
    assert find_warnings([good] * 40 + [good | {"explained_variance": -2.0}] * 20)[0][1] == "misleading critic"
    assert find_warnings([good] * 40 + [good | {"value_loss": 30.0}] * 20)[0][1] == "diverging critic"
    stopped = good | {"skipped": "value_gradient_not_finite", "value_loss": math.nan}
    assert (41, "steps skipped") in find_warnings([good] * 40 + [stopped])


def test_a_sign_that_comes_back_is_told_again() -> None:
    assert [sign for _, sign in find_warnings(([SOUND] * 30 + [CUT] * 15) * 2)] == ["truncated answers"] * 2


def test_a_sign_that_flickers_is_told_once() -> None:
    lookout = SignWatch()
    flicker = ([CUT] * 4 + [SOUND] * 7) * 20
    assert len([finding for fields in [SOUND] * WINDOW + flicker for finding in lookout.step(fields, 4)]) == 1


def test_chance_is_no_sign_but_an_error_is_told_at_once() -> None:
    assert find_warnings([CUT, *[SOUND] * 20]) == []
    assert (1, "broken mismatch") in find_warnings([BROKEN])


@pytest.mark.parametrize("broken", [math.nan, math.inf, None])
def test_a_figure_that_is_not_finite_hides_no_sign_and_makes_none(broken: float | None) -> None:
    assert (
        find_warnings(
            [SOUND | dict.fromkeys(("entropy", "kl_k3", "truncated", "grad_norm"), broken)] * 3 + [SOUND] * 30
        )
        == []
    )
    shown = [sign for _, sign in find_warnings([SOUND] * 30 + [CUT | {"truncated": broken}, *[CUT] * 9])]
    assert shown == ["truncated answers"]


def test_what_is_kept_of_a_long_training_shows_what_all_of_it_would() -> None:
    dice, lookout, steps, open_signs = random.Random(0), SignWatch(), [], set[str]()
    level = 1.0
    for _ in range(400):
        level *= dice.choice((0.8, 1.0, 1.0, 1.25))
        steps.append({"entropy": level, "grad_norm": 1 / level, "kl_k3": 0.02 / level, "truncated": 0.2 * level})
        fresh = {finding.check for finding in lookout.step(steps[-1], 4)}
        shown = {
            f.check for f in find_signs(steps, 4) if f.level == "error" or (f.level != "ok" and len(steps) >= WINDOW)
        }
        assert fresh <= shown
        assert shown <= open_signs | fresh
        open_signs |= fresh
    assert len(open_signs) > 3


def test_what_a_sign_says_names_figure_limit_and_remedy() -> None:
    lookout = SignWatch()
    (finding,) = (f for f in lookout.step(BROKEN, 4) if f.check == "broken mismatch")
    assert finding.text == (
        "kl_k3 of engine and learner 9 (broken above 0.5): the engine does not sample from the trained policy: pause the run, and let swarmq doctor tell the causes apart"
    )
