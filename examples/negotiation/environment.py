"""Two traders and one price. Pure and seeded.

The seller has a cost, the buyer a value above it, and neither knows the other's number. They speak in turn: `offer N`, `accept`
or `leave`. A trade shares the surplus, value minus cost, by its price; without a trade both get nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

SIDES = ("seller", "buyer")
HIGHEST = {"toy": 9, "full": 99}
MOVES = {"toy": 4, "full": 10}
"""Largest number of moves of both sides together."""
TRAINED = {"toy": 2000, "full": 10_000}
HELD_OUT = 96
_OFFER = re.compile(r"offer\s+(\d{1,3})", re.IGNORECASE)


def train() -> Iterator[dict[str, Any]]:
    return tasks("train", "toy", TRAINED["toy"])


def held_out() -> Iterator[dict[str, Any]]:
    return tasks("held-out", "toy", HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    return tasks("train", "full", TRAINED["full"])


def held_out_full() -> Iterator[dict[str, Any]]:
    return tasks("held-out", "full", HELD_OUT)


def tasks(split: str, size: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first bargains of a split. There are few different ones at toy size, so the splits share some: the policy learns
    a way to trade, and there is no answer to remember."""
    dice = random.Random(f"{split}-{size}")
    for number in range(count):
        yield {"id": f"{split}-{size}-{number}", **draw(dice, size)}


def draw(dice: random.Random, size: str) -> dict[str, Any]:
    """Return a bargain whose value is at least two above its cost."""
    cost = dice.randrange(1, HIGHEST[size] // 2 + 1)
    value = dice.randrange(cost + 2, HIGHEST[size] + 1)
    return {"size": size, "cost": cost, "value": value, "first": dice.choice(SIDES)}


class Bargain:
    """One negotiation. `turn` is the side that moves, `price` the agreed one, `ended` how it ended."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self.turn: str = task["first"]
        self.moves = 0
        self.offer: int | None = None
        self.price: int | None = None
        self.ended = ""

    def move(self, text: str) -> str:
        """Make the move that the last line of a text names, and return it in its plain form. Anything else counts as `leave`."""
        last = (text.strip().splitlines() or [""])[-1].strip(" .!*").lower()
        self.moves += 1
        said = "leave"
        if last == "accept" and self.offer is not None:
            self.price, self.ended, said = self.offer, "trade", "accept"
        elif (found := _OFFER.fullmatch(last)) and int(found[1]) <= HIGHEST[self._task["size"]]:
            self.offer, said = int(found[1]), f"offer {int(found[1])}"
            self.ended = "" if self.moves < MOVES[self._task["size"]] else "late"
        else:
            self.ended = "left"
        self.turn = SIDES[1 - SIDES.index(self.turn)]
        return said

    def shares(self) -> dict[str, float]:
        """Return what each side gets of the surplus: negative for a price beyond its number, 0 without a trade."""
        if self.price is None:
            return dict.fromkeys(SIDES, 0.0)
        surplus = self._task["value"] - self._task["cost"]
        shares = {"seller": self.price - self._task["cost"], "buyer": self._task["value"] - self.price}
        return {side: max(-1.0, share / surplus) for side, share in shares.items()}
