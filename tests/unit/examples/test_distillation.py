"""The tutorial `examples/distillation`: its toy teacher plays better than the student, and both have the same tokenizer."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from examples.distillation import demonstrations as teacher
from examples.frozen_lake import demonstrations as student
from examples.frozen_lake.environment import Lake, held_out

from swarmq.config import SwarmJob
from swarmq.toy_model import load_lessons

FOLDER = Path(__file__).parents[3] / "examples" / "distillation"
#  S . O
#  O . .
#  . . G
TASK = {"rows": ["..O", "O..", "..."], "start": [0, 0], "goal": [2, 2], "moves": 5}


def test_tokenizers_are_learned_from_the_same_chats():
    ours, theirs = (load_lessons(module.__name__) for module in (teacher, student))
    assert (ours.recipe.vocabulary, ours.recipe.seed) == (theirs.recipe.vocabulary, theirs.recipe.seed)
    assert ours.recipe.tokenizer_chats == theirs.recipe.tokenizer_chats
    for one, other in zip(*(islice(lessons.chats(), 400) for lessons in (ours, theirs)), strict=True):
        assert one == other


def test_the_teacher_ends_with_its_own_play_and_more_of_it_than_the_student_has():
    ours, theirs = load_lessons(teacher.__name__).recipe, load_lessons(student.__name__).recipe
    assert ours.steps == theirs.steps
    assert ours.settling_steps > theirs.settling_steps
    assert ours.architecture == theirs.architecture


@pytest.mark.parametrize(
    ("moves", "chosen"),
    [([], ["right"]), (["right"], ["down"]), (["right", "down"], ["right", "down"])],
)
def test_the_teacher_looks_and_heads_for_the_goal(moves, chosen):
    lake = Lake(TASK)
    for move in moves:
        lake.step(move)
    assert sorted(teacher.look_and_head(lake)) == sorted(chosen)


def test_the_teacher_avoids_holes_where_no_safe_move_leads_to_the_goal():
    lake = Lake({"rows": ["...", ".OO", "..."], "start": [0, 1], "goal": [2, 2], "moves": 5})
    assert teacher.look_and_head(lake) == ["right"]
    lake.step("right")
    assert teacher.look_and_head(lake) == ["left"]


def test_the_teacher_reaches_more_goals_than_any_player_that_the_student_copies():
    def rate(walker):
        dice, reached = random.Random(0), 0
        for task in held_out():
            lake = Lake(task)
            student.walk(lake, walker, dice)
            reached += lake.over == "goal"
        return reached / 96

    others = [rate(walker) for walker in (student.head_for_goal, student.stay_on_ice, student.stumble)]
    assert rate(teacher.look_and_head) > max(others) + 0.2


@pytest.mark.parametrize("name", ["job.toml", "job_h200.toml"])
def test_the_teacher_is_served_by_the_same_job_with_room_for_a_token_more(name):
    job = SwarmJob.load(FOLDER / name)
    assert job.policies["main"].train.teacher_policy == "teacher"
    assert list(job.policies) == ["main", "teacher"], "agents call the first"
    assert job.frozen == ("teacher",)
    rooms = [policy.engine.max_model_len for policy in job.policies.values()]
    assert rooms[1] == rooms[0] + 1
