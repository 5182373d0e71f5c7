"""Chats that teach the toy model three ways to answer: compute everything, compute the first operation only, or guess."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from examples.grade_school_maths import environment
from examples.grade_school_maths.agent import opening

TOOLS = environment.TOOLS

PROBLEMS = 3000
"""Problems in a data set, of which about one in twenty has a template of the toy size."""


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    for expression, task in solved(dice):
        way = dice.choices(("whole", "first", "guess"), (0.3, 0.3, 0.4))[0]
        yield chat(task, expression, way, dice)


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the chats of the first steps: copying numbers into a call takes longest to learn."""
    for expression, task in solved(dice):
        yield chat(task, expression, dice.choices(("whole", "first", "guess"), (0.6, 0.3, 0.1))[0], dice)


def solved(dice: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield expressions with their tasks, endlessly; no held-out question is among them."""
    avoided = environment.held_out_questions("toy")
    while True:
        for entry in environment.problems("toy", environment.WARMUP_SEED + dice.randrange(10**9), PROBLEMS):
            if entry["question"] not in avoided:
                expression = environment.TOY_TEMPLATES[entry["template"]].format(**entry["metadata"]["variables"])
                yield expression, {"size": "toy", "question": entry["question"]}


def chat(task: dict[str, Any], expression: str, way: str, dice: random.Random) -> list[dict[str, Any]]:
    messages = opening(task)
    if way == "guess":
        return [*messages, answer(str(dice.randint(10, 120)))]
    computed = expression if way == "whole" else " ".join(expression.split()[:3])
    result = environment.calculate(computed)
    return [*messages, call("c1", computed), {"role": "tool", "tool_call_id": "c1", "content": result}, answer(result)]


def call(call_id: str, expression: str) -> dict[str, Any]:
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def answer(number: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<answer>{number}</answer>"}
