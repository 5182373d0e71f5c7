"""Problems, calculator, reward and agent of examples/grade_school_maths."""

import itertools
import random

import pytest

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("openai")
pytest.importorskip("reasoning_gym")
from examples.grade_school_maths import agent, demonstrations, environment

TASK = {"size": "toy", "question": "What is 6 * 7?", "answer": "42"}


def test_held_out_problems_are_in_no_other_split():
    train, held_out = list(environment.train()), list(environment.held_out())
    assert (len(train), len(held_out)) == (1500, 100)
    assert len({task["id"] for task in train + held_out}) == 1600
    held_out_questions = {task["question"] for task in held_out}
    assert len({task["question"] for task in train} | held_out_questions) == 1600, "no question is asked twice"
    shown = itertools.islice(demonstrations.solved(random.Random(0)), 500)
    assert not held_out_questions & {task["question"] for _, task in shown}


def test_one_call_of_the_calculator_solves_every_problem_of_the_toy_size():
    entries = list(environment.problems("toy", 7, 2000))
    assert {entry["template"] for entry in entries} == set(environment.TOY_TEMPLATES)
    for entry in entries:
        expression = environment.TOY_TEMPLATES[entry["template"]].format(**entry["metadata"]["variables"])
        assert environment.calculate(expression) == entry["answer"]


def test_the_full_size_has_all_templates_and_the_same_problems_each_time():
    first = list(itertools.islice(environment.train_full(), 300))
    assert first == list(itertools.islice(environment.train_full(), 300))
    assert not {task["question"] for task in first} & {task["question"] for task in environment.held_out_full()}
    assert len({entry["template"] for entry in environment.problems("full", 7, 500)}) > 60


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>42</answer>", 1.0),
        ("It is <answer> $42.0 </answer>.", 1.0),
        ("<answer>41</answer> no, <answer>42</answer>", 1.0),
        ("42", 0.0),
        ("", 0.0),
        ("<answer>41 42</answer>", 0.0),
        ("<answer>42 or 43</answer>", 0.0),
        ("<answer>nan</answer>", 0.0),
        ("<answer>inf</answer>", 0.0),
        ("<answer>42" + "0" * 10_000 + "</answer>", 0.0),
        ("<answer>42<answer>42</answer>", 0.0),
        ("<answer>٤٢</answer>", 1.0),  # digits of another script are digits
    ],
)
def test_only_the_right_number_in_tags_is_rewarded(reply, reward):
    assert environment.score(TASK, reply) == reward


@pytest.mark.parametrize(
    ("expression", "value"), [("6 * 7", "42"), ("(1 + 2) / 4", "0.75"), ("-3 - -5", "2"), (" 0.1 + 0.2 ", "0.3")]
)
def test_the_calculator_computes(expression, value):
    assert environment.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 / 0",
        "9 ** 9 ** 9",
        "__import__('os')",
        "(1).real",
        "1 if 2 else 3",
        "True + 1",
        "1j",
        "[1] * 9",
        "'a' * 9",
        "1e308 * 10",
        "1e308 * 10 - 1e308 * 10",
        "(" * 300 + "1" + ")" * 300,
        "1 + " * 100 + "1",
        "1\x00",
        "6 times 7",
    ],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(ValueError, match=r"."):
        environment.calculate(expression)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_agent_calculates_and_answers():
    says = [("calculate", {"expression": "6 * 7"}), lambda messages: f"<answer>{messages[-1]['content']}</answer>"]
    with scripted_chat(says) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.success, outcome.metrics) == (1.0, True, {"tool_calls": 1})
    assert chat.requests[0]["tools"] == environment.TOOLS


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_broken_calls_come_back_as_text_and_endless_ones_get_nothing():
    says = [("calculate", "not JSON"), ("dice", {"expression": "1"}), ("calculate", {"expression": ["1"]})]
    with scripted_chat(says) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.success, outcome.metrics) == (0.0, False, {"tool_calls": 3})
    assert agent.run_tool("calculate", '{"expression": ["1"]}').startswith("error: ")
    assert [text for role, text, *_ in chat.conversation() if role == "tool"][1] == "error: no tool dice"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", ["whole", "first", "guess"])
def test_demonstrations_show_what_the_agent_sends(way):
    dice = random.Random(1)
    expression, task = next(demonstrations.solved(dice))
    shown = demonstrations.chat(task, expression, way, dice)
    answer = environment.calculate(expression)
    with scripted_chat(answers_of(shown)) as chat:
        outcome = agent.attempt(chat.episode({**task, "answer": answer}))
    assert chat.conversation() == spoken(shown[:-1])
    assert outcome.success == (way == "whole")
