"""A frozen lake: walk over the ice to the goal without stepping into a hole. Pure and seeded; the splits share no lake.

Each task is a lake of its own. The player sees the four neighbouring fields and the direction of the goal, never the whole map.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

MOVES = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
SIZE, SIZE_FULL = 4, 8
HOLES = 0.25
"""Share of fields that are holes."""
HELD_OUT, HELD_OUT_FULL = 96, 256
ICE, HOLE = ".", "O"
Field = tuple[int, int]


def train() -> Iterator[dict[str, Any]]:
    return tasks("train", 2500)


def held_out() -> Iterator[dict[str, Any]]:
    return tasks("held_out", HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    return tasks("train", 20_000, size=SIZE_FULL)


def held_out_full() -> Iterator[dict[str, Any]]:
    return tasks("held_out", HELD_OUT_FULL, size=SIZE_FULL)


def tasks(split: str, count: int, *, size: int = SIZE) -> Iterator[dict[str, Any]]:
    """Yield the first lakes of a split."""
    for number, lake in enumerate(islice(lakes(random.Random(f"{split}-{size}"), split, size), count)):
        yield {"id": f"{split}-{size}-{number}", **lake}


def lakes(dice: random.Random, split: str, size: int = SIZE) -> Iterator[dict[str, Any]]:
    """Yield an endless stream of different lakes, without held-out ones unless they are the split."""
    seen = set() if split == "held_out" else {_key(lake) for lake in tasks("held_out", HELD_OUT_FULL, size=size)}
    while True:
        lake = draw(dice, size)
        if _key(lake) not in seen:
            seen.add(_key(lake))
            yield lake


def draw(dice: random.Random, size: int) -> dict[str, Any]:
    """Return a lake whose goal is at least `size - 1` moves away and can be reached by a shortest walk over ice."""
    while True:
        rows = ["".join(HOLE if dice.random() < HOLES else ICE for _ in range(size)) for _ in range(size)]
        start, goal = ((dice.randrange(size), dice.randrange(size)) for _ in range(2))
        away = abs(start[0] - goal[0]) + abs(start[1] - goal[1])
        if away >= size - 1 and _has_short_walk(rows, start, goal):
            return {"rows": rows, "start": list(start), "goal": list(goal), "moves": 2 * size - 1}


class Lake:
    """One game. `at` is the player's field, `over` says how it ended."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._rows: list[str] = task["rows"]
        self._goal: Field = tuple(task["goal"])
        self.at: Field = tuple(task["start"])
        self.left: int = task["moves"]
        self.over = ""

    def step(self, move: str) -> None:
        """Make a move. A word that is no move, or a move over the edge, costs a move and leads nowhere."""
        self.left -= 1
        aim = _add(self.at, MOVES.get(move, (0, 0)))
        if self.look(aim) != "edge":
            self.at = aim
        if self.at == self._goal:
            self.over = "goal"
        elif self.look(self.at) == "hole":
            self.over = "hole"
        elif self.left == 0:
            self.over = "late"

    def look(self, field: Field) -> str:
        """Return what is on a field: ice, hole, goal or edge."""
        row, column = field
        if not (0 <= row < len(self._rows) and 0 <= column < len(self._rows)):
            return "edge"
        if field == self._goal:
            return "goal"
        return "hole" if self._rows[row][column] == HOLE else "ice"

    def towards(self) -> list[str]:
        """Return the moves that come nearer to the goal."""
        down, right = self._goal[0] - self.at[0], self._goal[1] - self.at[1]
        wanted = {"up": down < 0, "right": right > 0, "down": down > 0, "left": right < 0}
        return [move for move, is_nearer in wanted.items() if is_nearer]

    def neighbours(self) -> dict[str, str]:
        """Return move -> what is there."""
        return {move: self.look(_add(self.at, way)) for move, way in MOVES.items()}

    def describe(self) -> str:
        """Return what the player sees."""
        seen = [f"{move}: {what}" for move, what in self.neighbours().items()]
        return "\n".join([*seen, f"goal: {' and '.join(self.towards())}"])


def _has_short_walk(rows: list[str], start: Field, goal: Field) -> bool:
    """Return whether a walk that never goes away from the goal leads from ice to ice."""
    steps = [(a, b) for a, b in ((_sign(goal[0] - start[0]), 0), (0, _sign(goal[1] - start[1]))) if (a, b) != (0, 0)]
    if rows[start[0]][start[1]] == HOLE or rows[goal[0]][goal[1]] == HOLE:
        return False
    return start == goal or any(_has_short_walk(rows, _add(start, step), goal) for step in steps)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _add(field: Field, way: Field) -> Field:
    return field[0] + way[0], field[1] + way[1]


def _key(lake: dict[str, Any]) -> str:
    return f"{lake['rows']} {lake['start']} {lake['goal']}"
