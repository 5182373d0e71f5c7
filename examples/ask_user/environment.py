"""Requests for a taxi that lack a detail, and the user who made them, simulated by code. Pure and seeded.

A request names some of the fields of a booking. The user knows the others and tells one when asked for it, and only then. Names of
held-out requests occur in no training request.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

FIELDS = {"toy": ("name", "place", "time"), "full": ("name", "place", "time", "people", "luggage")}
QUESTIONS = {
    "name": "For whom?",
    "place": "To which place?",
    "time": "At what time?",
    "people": "How many people?",
    "luggage": "How many bags?",
}
ASKS_FOR = {
    "name": r"\b(whom?|whose|name)\b",
    "place": r"\b(where|place|destination|address)\b",
    "time": r"\b(when|time|hour)\b",
    "people": r"\b(people|persons|passengers|seats)\b",
    "luggage": r"\b(luggage|bags?|suitcases?)\b",
}
NEEDLESS_COST = 0.2
"""What a question costs whose answer the request had."""
TRAINED = {"toy": 2000, "full": 10_000}
HELD_OUT = 96

NAMES = (
    *(
        "Ada",
        "Ben",
        "Cleo",
        "Dan",
        "Eva",
        "Finn",
        "Gus",
        "Hana",
        "Ida",
        "Jon",
        "Kim",
        "Leo",
        "Mia",
        "Ned",
        "Ola",
        "Pia",
    ),
    *("Quin", "Rosa", "Sam", "Tess", "Ugo", "Vera", "Will", "Yara"),
)
HELD_OUT_NAMES = NAMES[::6]
PLACES = (
    "airport",
    "bridge",
    "castle",
    "church",
    "harbour",
    "hotel",
    "market",
    "museum",
    "park",
    "school",
    "station",
    "zoo",
)


def train() -> Iterator[dict[str, Any]]:
    return tasks("train", "toy", TRAINED["toy"])


def held_out() -> Iterator[dict[str, Any]]:
    return tasks("held-out", "toy", HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    return tasks("train", "full", TRAINED["full"])


def held_out_full() -> Iterator[dict[str, Any]]:
    return tasks("held-out", "full", HELD_OUT)


def tasks(split: str, size: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first requests of a split."""
    dice = random.Random(f"{split}-{size}")
    names = HELD_OUT_NAMES if split == "held-out" else [name for name in NAMES if name not in HELD_OUT_NAMES]
    for number in range(count):
        yield {"id": f"{split}-{size}-{number}", **draw(dice, size, names)}


def draw(dice: random.Random, size: str, names: Any = NAMES) -> dict[str, Any]:
    """Return a request; three in four lack a field, and at full size up to three."""
    booking = {
        "name": dice.choice(names),
        "place": dice.choice(PLACES),
        "time": f"{dice.randrange(24):02}:{dice.choice(('00', '15', '30', '45'))}",
        "people": str(dice.randrange(1, 7)),
        "luggage": str(dice.randrange(5)),
    }
    fields = FIELDS[size]
    missing = dice.sample(fields, dice.randint(1, 3 if size == "full" else 1)) if dice.random() < 0.75 else []
    return {"size": size, "booking": {field: booking[field] for field in fields}, "missing": missing}


def write_request(task: dict[str, Any]) -> str:
    booking, missing = task["booking"], task["missing"]
    parts = {
        "name": f"for {booking['name']}",
        "place": f"to the {booking['place']}",
        "time": f"at {booking['time']}",
        "people": f"for {booking.get('people')} people",
        "luggage": f"with {booking.get('luggage')} bags",
    }
    said = [parts[field] for field in booking if field not in missing]
    return " ".join(["A taxi", *said]) + "."


class User:
    """The user who made a request, in one conversation."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._booking, self._missing = task["booking"], task["missing"]
        self.told: set[str] = set()
        self.needless = 0
        """Number of questions whose answer the request had, or that nobody understands."""

    def reply(self, question: str) -> str:
        """Return the answer to a question: one detail for each question, the first one that it asks for."""
        asked = [field for field in self._booking if re.search(ASKS_FOR[field], question, re.IGNORECASE)]
        news = [field for field in asked if field in self._missing and field not in self.told]
        if not news:
            self.needless += 1
            return "I said that." if asked else "What do you mean?"
        self.told.add(news[0])
        return f"{self._booking[news[0]]}."


def read_booking(text: str, size: str) -> dict[str, str] | None:
    """Return the booking in a text whose last line is `book` and the fields with commas between; None if it is none."""
    last = (text.strip().splitlines() or [""])[-1].strip()
    found = re.fullmatch(r"book[: ]\s*(.+?)\.?", last, re.IGNORECASE)
    values = [value.strip() for value in found[1].split(",")] if found else []
    return dict(zip(FIELDS[size], values, strict=True)) if len(values) == len(FIELDS[size]) else None


def score(task: dict[str, Any], booking: dict[str, str] | None, needless: int) -> float:
    """Return 1 for the right booking, less 0.2 for each needless question; 0 for a wrong one."""
    right = booking is not None and all(
        booking[field].casefold() == value.casefold() for field, value in task["booking"].items()
    )
    return max(0.0, 1.0 - NEEDLESS_COST * needless) if right else 0.0
