"""Demonstrations for the toy teacher: those of the student first, then a player that looks and heads for the goal.

Teacher and student must have the same tokenizer. A toy model's tokenizer is learned from its first chats, so the teacher begins with
those of the student, which are FrozenLake's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples.frozen_lake import demonstrations as student
from examples.frozen_lake.environment import Lake, lakes

RECIPE = {**student.RECIPE, "settling_steps": 120}

copying = student.demonstrations


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    for task in lakes(dice, "demonstrations"):
        yield student.walk(Lake(task), look_and_head, dice)


def look_and_head(lake: Lake) -> list[str]:
    """Return the safe moves that come nearer to the goal; all safe moves if there is none."""
    safe = student.stay_on_ice(lake)
    return [move for move in lake.towards() if move in safe] or safe
