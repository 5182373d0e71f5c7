"""The check of a made task takes the answer out of a model's text, and is not fooled by lists of answers."""

from __future__ import annotations

import pytest

from swarmq.errors import RewardError
from swarmq.tasks import Check, extract_answer, score


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 4\nNo.\n**Answer:** 5", "5"),
        ("so\nit is 7", "it is 7"),
        ("", ""),
        ("> answer : Rome**", "Rome"),
    ],
)
def test_the_last_answer_counts(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("check", "answer", "value"),
    [
        (Check(type="exact", expected=("NaCl", "salt")), "Salt.", 1.0),
        (Check(type="exact", expected=("salt",)), "salt, pepper", 0.0),
        (Check(type="phrase", expected=("Anna Holm",)), "Ana Holm", 1.0),
        (Check(type="phrase", expected=("Anna Holm",)), "Anna Holm or Ole Berg or Per Dahl", 0.0),
        (Check(type="number", expected=("1,844",), tolerance=0.01), "1840 m", 1.0),
        (Check(type="number", expected=("1844",)), "1843 1844", 0.0),
        (Check(type="number", expected=("0.5",)), "no idea", 0.0),
        (Check(type="choice", expected=("B",)), "(b)", 1.0),
        (Check(type="choice", expected=("B",)), "A or B", 0.0),
    ],
)
def test_a_check_scores_right_and_wrong_answers(check: Check, answer: str, value: float) -> None:
    assert check.score(answer).value == value


@pytest.mark.parametrize(
    "task",
    [{"id": "x"}, {"check": {"type": "exact", "expected": [" "]}}, {"check": {"type": "number", "expected": ["two"]}}],
)
def test_a_task_without_a_usable_check_fails_the_episode(task: dict) -> None:
    with pytest.raises(RewardError, match="check"):
        score(task, "Answer: 1")
