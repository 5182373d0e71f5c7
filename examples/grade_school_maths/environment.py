"""Word problems of grade-school mathematics (`gsm_symbolic` of reasoning-gym), and a calculator.

The toy size has four of the 85 kinds of problems; one call of the calculator solves each of them.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import reasoning_gym

TOY_TEMPLATES: dict[int, str] = {
    6: "{n_girls} * {multiplier} + {n_girls}",
    10: "{age1} * {mult} - {years}",
    43: "{first_amount} - {difference} + {first_amount}",
    58: "{volume} * {num_containers} * {calories}",
}
"""Numbers of the toy size's templates, with the expression that solves each; only demonstrations use the expressions."""

SEEDS = {"held_out": 0, "train": 1_000_000_000}
WARMUP_SEED = 2_000_000_000
"""Demonstrations use data sets with this seed or a larger one."""
HELD_OUT = 100
TRAINED = {"toy": 1500, "full": 20_000}
MAX_EXPRESSION = 200
MAX_ANSWER = 40
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute an expression of numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def train() -> Iterator[dict[str, Any]]:
    """Yield the training tasks of the toy size."""
    return _tasks("train", "toy")


def held_out() -> Iterator[dict[str, Any]]:
    """Yield the held-out tasks of the toy size."""
    return _tasks("held_out", "toy")


def train_full() -> Iterator[dict[str, Any]]:
    """Yield training tasks of every kind that `gsm_symbolic` has."""
    return _tasks("train", "full")


def held_out_full() -> Iterator[dict[str, Any]]:
    return _tasks("held_out", "full")


def score(task: dict[str, Any], reply: str) -> float:
    """Return 1 if the last <answer> holds nothing but the right number."""
    answers = ANSWER.findall(reply)
    given = answers[-1].strip().lstrip("$£€") if answers else ""
    if len(given) > MAX_ANSWER or not NUMBER.fullmatch(given):
        return 0.0
    return 1.0 if float(given.replace(",", "")) == float(task["answer"]) else 0.0


def calculate(expression: str) -> str:
    """Return the value of an expression as text. Raises ValueError for anything but numbers, + - * / and parentheses."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"cannot be computed: {expression}") from error
    if not math.isfinite(value):
        raise ValueError(f"the result is too large: {expression}")
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case _:
            raise ValueError("only numbers, + - * / and parentheses")


def problems(size: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the entries of a data set of `count` problems; at toy size only those of its templates."""
    entries: Any = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=count)
    for number, template in enumerate(entries.task_indices):
        if size == "full" or template in TOY_TEMPLATES:
            yield {**entries[number], "template": template}


def held_out_questions(size: str) -> frozenset[str]:
    return frozenset(task["question"] for task in _tasks("held_out", size))


def _tasks(split: str, size: str) -> Iterator[dict[str, Any]]:
    """Yield tasks with different questions; none of the held-out questions is among the training tasks."""
    wanted = HELD_OUT if split == "held_out" else TRAINED[size]
    seen = set() if split == "held_out" else set(held_out_questions(size))
    for number, entry in enumerate(problems(size, SEEDS[split], 30 * wanted if size == "toy" else 3 * wanted)):
        if not wanted:
            return
        if entry["question"] not in seen:
            seen.add(entry["question"])
            wanted -= 1
            yield {
                "id": f"{split}-{size}-{number}",
                "size": size,
                "question": entry["question"],
                "answer": entry["answer"],
            }
