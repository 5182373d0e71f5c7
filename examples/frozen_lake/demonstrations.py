"""Demonstrations for the toy model: walkers of three characters, none of whom plays well.

One heads for the goal and does not look, one stays on the ice and does not care where the goal is, one stumbles about. To do what
the first two do, both at once, is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from examples.frozen_lake.agent import opening
from examples.frozen_lake.environment import MOVES, Lake, lakes

RECIPE = {"steps": 90, "settling_steps": 30}


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    for task in lakes(dice, "demonstrations"):
        yield walk(Lake(task), dice.choice([head_for_goal, stay_on_ice, stumble]), dice)


def walk(lake: Lake, walker: Callable[[Lake], list[str]], dice: random.Random) -> list[dict[str, Any]]:
    """Return the chat of a walk whose moves are drawn from those that the walker considers."""
    messages = opening(lake)
    while not lake.over:
        move = dice.choice(walker(lake))
        lake.step(move)
        messages += [{"role": "assistant", "content": move}, {"role": "user", "content": lake.describe()}]
    return messages[:-1]


def head_for_goal(lake: Lake) -> list[str]:
    return lake.towards()


def stay_on_ice(lake: Lake) -> list[str]:
    return [move for move, what in lake.neighbours().items() if what in {"ice", "goal"}] or list(MOVES)


def stumble(_lake: Lake) -> list[str]:
    return list(MOVES)
