"""An answer equals the expected text or it does not; no answer is right because nothing was expected."""

import pytest

from swarmq.errors import RewardError
from swarmq.rewards import exact_match, fuzzy_match, normalise


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Paris", 1), (" PARIS.\n", 1), ('"Paris"', 1), ("\u201cParis\u201d.", 1), ("\uff30\uff41\uff52\uff49\uff53", 1),
        ("", 0), ("not Paris", 0), ("Paris or London", 0), ("Paris\nLondon", 0), ("paris" * 1_000_000, 0),
    ],
)  # fmt: skip
def test_exact_match_forgives_form_alone(answer, value):
    score = exact_match(answer, ["Paris", "City of Light"])
    assert float(score) == value
    assert bool(score.reason) == (value == 0)


def test_fuzzy_match_lowers_the_score_of_an_answer_that_lists_everything():
    assert fuzzy_match("Colour.", "colour").value == 1.0
    assert 0.8 < fuzzy_match("color", "colour").value < 1.0
    assert fuzzy_match("color", "colour", least=0.95).value == 0.0
    assert fuzzy_match("red green blue yellow colour " * 50, "colour").value < 0.05
    assert fuzzy_match("x" * 10_000_000, "colour").value == 0.0


@pytest.mark.parametrize("expected", ["", "  ", [], ["a", ""], [None]])
@pytest.mark.parametrize("match", [exact_match, fuzzy_match])
def test_an_empty_expectation_is_an_error_and_not_a_reward(match, expected):
    with pytest.raises(RewardError, match="expected is"):
        match("", expected)


def test_normalisation_keeps_what_changes_the_meaning():
    assert normalise("-5") != normalise("5")
    assert normalise("4.2") != normalise("42")
    assert normalise("?") == "?"
