"""Demonstrations for the toy model: it tries expressions with the calculator for a while, then answers, often too early.

Whoever has found the target answers with it. Whoever has not guesses one of the expressions that are left. That it pays to go on
until the target is found is left to reinforcement learning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from examples.countdown import agent
from examples.countdown.environment import calculate, candidates, problems, run_calculator

TOOLS = agent.TOOLS
PATIENCE = 0.35
"""Probability of another call, as long as the target is not found."""


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    yield from _chats(dice, PATIENCE)


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield chats with more calls: copying numbers into a call takes longest to learn."""
    yield from _chats(dice, 0.9)


def _chats(dice: random.Random, patience: float) -> Iterator[list[dict[str, Any]]]:
    for task in problems(dice, "demonstrations"):
        messages, left = agent.opening(task), candidates(task["numbers"])
        dice.shuffle(left)
        found = None
        while not found and len(left) > 1 and dice.random() < patience:
            expression = left.pop()
            function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
            messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})
            messages.append({"role": "tool", "content": run_calculator(task, expression)})
            if calculate(expression) == task["target"]:
                found = expression
        yield [*messages, {"role": "assistant", "content": f"<answer>{found or left[-1]}</answer>"}]
