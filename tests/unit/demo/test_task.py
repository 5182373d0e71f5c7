"""The demo's problems and how they are scored."""

from __future__ import annotations

import itertools

import pytest

from swarmq.demo.problems import HELD_OUT_PER_KIND, KINDS, problems, score, solution

SPLITS = ("held-out", "train", "warmup")


@pytest.mark.parametrize("kind", KINDS)
def test_no_held_out_question_is_trained_or_demonstrated(kind):
    held_out = {p.question for p in problems(kind, "held-out", HELD_OUT_PER_KIND)}
    for split in ("train", "warmup"):
        assert not held_out & {p.question for p in problems(kind, split, 5000)}


@pytest.mark.parametrize("kind", KINDS)
def test_task_ids_name_one_problem(kind):
    ids = [p.task_id for split in SPLITS for p in problems(kind, split, 200)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_problems_are_the_same_each_time(kind):
    assert list(problems(kind, "train", 20)) == list(problems(kind, "train", 20))


def test_a_later_start_goes_on_where_an_earlier_one_was():
    whole = list(problems("sum", "train", 20))
    assert list(problems("sum", "train", 3, start=whole[5].number)) == whole[5:8]


@pytest.mark.parametrize(("kind", "split"), list(itertools.product(KINDS, SPLITS)))
def test_the_true_answer_scores_one_and_nothing_else_does(kind, split):
    for problem in problems(kind, split, 20):
        _, answer = solution(problem)
        assert score(problem, f"<answer>{answer}</answer>") == 1.0
        assert score(problem, f"<answer>{int(answer) + 1}</answer>") < 1.0
        assert score(problem, answer) == 0.0, "an answer outside the tags counts as none"
        assert score(problem, "") == 0.0


def test_the_last_answer_counts():
    problem = next(problems("sum", "train", 1))
    _, answer = solution(problem)
    assert score(problem, f"<answer>{answer}</answer><answer>no</answer>") == 0.0
