"""The tutorial `examples/countdown`: the game, its calculator, hostile answers, and the agent on a scripted model."""

from __future__ import annotations

import itertools
import random

import pytest
from examples.countdown import agent, demonstrations
from examples.countdown.environment import (
    calculate,
    candidates,
    held_out,
    held_out_full,
    question,
    run_calculator,
    score,
    train,
    train_full,
)

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("openai")
TASK = {"numbers": [40, 63], "target": 23, "hints": True}


@pytest.mark.parametrize(("trained", "kept"), [(train, held_out), (train_full, held_out_full)])
def test_splits_share_no_question_and_every_id_is_there_once(trained, kept):
    training, questions = list(itertools.islice(trained(), 2500)), [question(task) for task in kept()]
    assert not {question(task) for task in training} & set(questions)
    assert len(set(questions)) == len(questions)
    assert len({task["id"] for task in training}) == len(training)


def test_demonstrations_show_no_held_out_question():
    shown = itertools.islice(demonstrations.demonstrations(random.Random(0)), 2000)
    assert not {chat[1]["content"] for chat in shown} & {question(task) for task in held_out()}


def test_every_toy_task_is_solved_by_one_of_the_candidates():
    for task in itertools.islice(train(), 300):
        assert any(score(task, expression) for expression in candidates(task["numbers"]))


def test_the_calculator_says_whether_it_is_the_target_at_toy_size_only():
    assert run_calculator(TASK, "63 - 40") == "23\nthe target"
    assert run_calculator(TASK, "40 + 63") == "103\nnot the target"
    assert run_calculator({**TASK, "hints": False}, "63 - 40") == "23"
    assert run_calculator(TASK, "63 / 0").startswith("error: ")


def test_fractions_are_exact():
    assert calculate("(1 / 3) * 3") == 1


@pytest.mark.parametrize(
    "expression",
    [
        "23",  # the target itself, without the numbers
        "63 - 40 + 0",
        "63 - 40 + 40 - 40",
        "63 - 4 * 10",
        "63 + -40",
        "9**9**9",
        "__import__('os').system('true')",
        "(" * 200 + "1" + ")" * 200,
        "63 - 40\0",
        "63.0 - 40",
        "True + 22",
        "63 - 40; 1",
        "63 // 1 - 40",
        "",
    ],
)
def test_other_answers_have_no_reward(expression):
    assert score(TASK, expression) == 0.0


def test_a_right_answer_has_the_reward():
    assert score(TASK, " 63 - 40 ") == 1.0
    assert score({"numbers": [2, 3, 4], "target": 20}, "(2 + 3) * 4") == 1.0


def test_the_agent_calls_the_calculator_until_it_answers():
    script = [
        ("calculate", {"expression": "40 - 63"}),
        ("calculate", {"expression": "63 - 40"}),
        "<answer>63 - 40</answer>",
    ]
    with scripted_chat(script) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.success, outcome.metrics) == (1.0, True, {"calls": 2})
    assert [said for _, said, *_ in chat.conversation()][-1] == "23\nthe target"
    assert chat.requests[0]["tools"] == agent.TOOLS


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("rm", {}), "error: no tool rm"),
        (("calculate", "{"), "error: no expression"),
        (("calculate", {"expression": 3}), "error: the expression is no text"),
        (("calculate", []), "error: no expression"),
    ],
)
def test_a_wrong_call_is_answered_in_words(call, told):
    with scripted_chat([call, "I give up"]) as chat:
        assert agent.attempt(chat.episode(TASK)).reward == 0.0
    assert chat.conversation()[-1][1] == told


def test_an_agent_that_never_answers_ends_without_reward():
    with scripted_chat(itertools.repeat(("calculate", {"expression": "1 + 1"}))) as chat:
        assert agent.attempt(chat.episode(TASK)).reward == 0.0
    assert len(chat.requests) == agent.MAX_TURNS


def test_demonstrations_send_the_prompts_exactly_as_the_agent_does():
    stream = demonstrations.copying(random.Random(1))
    chat = next(chat for chat in stream if len(chat) > 5)
    task = next(task for task in _tasks_like(chat))
    with scripted_chat(answers_of(chat)) as played:
        agent.attempt(played.episode(task))
    assert played.conversation() == spoken(chat[:-1])


def _tasks_like(chat):
    numbers, target = chat[1]["content"].splitlines()
    yield {
        "numbers": [int(word) for word in numbers.split()[1:]],
        "target": int(target.split()[1]),
        "hints": True,
    }
