"""Chats of three programmers, from which the toy model learns the format: one reads the file and mends it, one reads it and does not
care, one does not read it. To read, and to do what the docstring says, is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.coding_agent.editor import READ, Message, open_conversation
from examples.coding_agent.environment import MEANINGS, Problem, problems

RECIPE = {"steps": 90, "settling_steps": 30}


def demonstrations(dice: random.Random) -> Iterator[list[Message]]:
    for problem in problems(dice, "demonstrations"):
        yield chat(problem, dice.choice(["careful", "careless", "blind"]), dice)


def chat(problem: Problem, way: str, dice: random.Random) -> list[Message]:
    line = f"return {problem.right if way == 'careful' else dice.choice(list(MEANINGS))}"
    reading = [{"role": "assistant", "content": READ}, {"role": "user", "content": problem.source}]
    return [
        *open_conversation(problem.prompt),
        *(reading if way != "blind" else []),
        {"role": "assistant", "content": line},
    ]
