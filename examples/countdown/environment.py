"""Countdown: combine the given numbers so that the result is the target. Pure and seeded; the splits share no question.

Toy size: two numbers and one of four ways to combine them; the calculator says whether its result is the target. Full size: four
numbers, target up to 100, a calculator that says nothing.
"""

from __future__ import annotations

import ast
import operator
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

LONGEST = 80
"""Most characters of an expression; longer ones are refused unread."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
HELD_OUT, HELD_OUT_FULL = 96, 256


def train() -> Iterator[dict[str, Any]]:
    return tasks("train", 2500)


def held_out() -> Iterator[dict[str, Any]]:
    return tasks("held_out", HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    return tasks("train", 20_000, numbers=4)


def held_out_full() -> Iterator[dict[str, Any]]:
    return tasks("held_out", HELD_OUT_FULL, numbers=4)


def tasks(split: str, count: int, *, numbers: int = 2) -> Iterator[dict[str, Any]]:
    """Yield tasks of a split; questions of the held-out split are in no other, and none comes twice."""
    for number, task in enumerate(islice(problems(random.Random(f"{split}-{numbers}"), split, numbers), count)):
        yield {"id": f"{split}-{numbers}-{number}", **task}


def problems(dice: random.Random, split: str, numbers: int = 2) -> Iterator[dict[str, Any]]:
    """Yield an endless stream of different problems, without held-out ones unless they are the split."""
    seen = (
        set() if split == "held_out" else {question(task) for task in tasks("held_out", HELD_OUT_FULL, numbers=numbers)}
    )
    while True:
        task = draw(dice, numbers)
        if question(task) not in seen:
            seen.add(question(task))
            yield task


def draw(dice: random.Random, numbers: int) -> dict[str, Any]:
    """Return one solvable problem."""
    while True:
        if numbers == 2:
            chosen = [dice.randint(2, 99), dice.randint(2, 99)]
            target = calculate(dice.choice(candidates(chosen)))
            hints = True
        else:
            chosen = [dice.randint(1, 25) for _ in range(numbers)]
            expression = str(chosen[0])
            for number in chosen[1:]:
                expression = f"({expression} {dice.choice('+-*')} {number})"
            target = calculate(expression)
            hints = False
        if 0 < target <= (9801 if hints else 100):
            return {"numbers": chosen, "target": int(target), "hints": hints}


def question(task: dict[str, Any]) -> str:
    return f"Numbers: {' '.join(map(str, task['numbers']))}\nTarget: {task['target']}"


def candidates(numbers: list[int]) -> list[str]:
    """Return the expressions that two numbers allow at toy size."""
    a, b = numbers
    return [f"{a} + {b}", f"{a} - {b}", f"{b} - {a}", f"{a} * {b}"]


def calculate(expression: str) -> Fraction:
    """Return the value of whole numbers joined by + - * / and parentheses. Raises ValueError for anything else."""
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only whole numbers, + - * / and parentheses")


def run_calculator(task: dict[str, Any], expression: str) -> str:
    """Return the calculator's answer in words; a mistake comes back as text."""
    try:
        value = calculate(expression)
    except ValueError as error:
        return f"error: {error}"
    if not task["hints"]:
        return str(value)
    return f"{value}\n{'the target' if value == task['target'] else 'not the target'}"


def score(task: dict[str, Any], expression: str) -> float:
    """Return 1 if the expression has the target's value and uses every given number exactly once, else 0."""
    try:
        right = calculate(expression) == task["target"]
        used = Counter(
            node.value
            for node in ast.walk(ast.parse(expression.strip(), mode="eval"))
            if isinstance(node, ast.Constant)
        )
    except ValueError:
        return 0.0
    return float(right and used == Counter(task["numbers"]))
