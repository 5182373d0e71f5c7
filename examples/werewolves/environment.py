"""A village with wolves among it: everyone speaks, then everyone votes, and the village wins if it votes a wolf out. Pure and seeded.

The wolves know each other. The seer knows one other player's role and may tell it; whether it is believed is up to the others, for
a wolf may say the same of anybody.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

SIDES = ("wolves", "villagers")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus")
PLAYERS = {"toy": 4, "full": 7}
WOLVES = {"toy": 1, "full": 2}
ROUNDS = {"toy": 1, "full": 2}
"""Times that everyone speaks before the vote."""
WOLF_SEEN = 0.75
"""Chance that the seer knows a wolf, not a villager."""
TRAINED = {"toy": 2000, "full": 10_000}
HELD_OUT = 96
LONGEST = 400
"""Characters of a speech at full size that the others hear."""
SILENCE = "nothing"
_CLAIM = re.compile(rf"({'|'.join(NAMES)}) is (a wolf|good)")


def train() -> Iterator[dict[str, Any]]:
    return tasks("train", "toy", TRAINED["toy"])


def held_out() -> Iterator[dict[str, Any]]:
    return tasks("held-out", "toy", HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    return tasks("train", "full", TRAINED["full"])


def held_out_full() -> Iterator[dict[str, Any]]:
    return tasks("held-out", "full", HELD_OUT)


def tasks(split: str, size: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first games of a split. In a game against a script, `side` is the policy's; the sides take turns.

    There are few different games at toy size, so the splits share some; no player sees which of them it plays.
    """
    dice = random.Random(f"{split}-{size}")
    for number in range(count):
        yield {"id": f"{split}-{size}-{number}", "side": SIDES[number % 2], "seed": number, **draw(dice, size)}


def draw(dice: random.Random, size: str) -> dict[str, Any]:
    """Return who has which role, and whose role the seer knows."""
    names = NAMES[: PLAYERS[size]]
    wolves = dice.sample(names, WOLVES[size])
    seer, *others = dice.sample([name for name in names if name not in wolves], len(names) - len(wolves))
    seen = dice.choice(wolves if dice.random() < WOLF_SEEN else others)
    return {"size": size, "wolves": wolves, "seer": seer, "seen": seen}


class Game:
    """One game: `said` is the talk so far, `votes` who voted for whom."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self.size: str = task["size"]
        self.players = NAMES[: PLAYERS[self.size]]
        self.said: list[tuple[str, str]] = []
        self.votes: dict[str, str] = {}

    def side(self, player: str) -> str:
        return "wolves" if player in self._task["wolves"] else "villagers"

    def others(self, player: str) -> list[str]:
        return [name for name in self.players if name != player]

    def secret(self, player: str) -> str:
        """Return what only this player is told: its role, and what it knows of others."""
        if self.side(player) == "wolves":
            return " ".join(["wolf.", *(f"{name} is a wolf." for name in self._task["wolves"] if name != player)])
        if player == self._task["seer"]:
            return f"seer. {self.claim(self._task['seen'])}."
        return "villager."

    def claim(self, player: str) -> str:
        """Return the sentence that tells the truth about a player."""
        return f"{player} is a wolf" if self.side(player) == "wolves" else f"{player} is good"

    def speak(self, player: str, text: str) -> None:
        """Let the others hear a speech: at toy size one claim or nothing, at full size the last line."""
        last = (text.strip().splitlines() or [""])[-1].strip()
        if self.size == "toy" and not _CLAIM.fullmatch(last):
            last = SILENCE
        self.said.append((player, last[:LONGEST] or SILENCE))

    def vote(self, player: str, text: str) -> None:
        """Vote for the other player whom the last line names; anything else is no vote."""
        last = (text.strip().splitlines() or [""])[-1].strip(" .!*")
        if last in self.others(player):
            self.votes[player] = last

    def claims(self) -> list[tuple[str, str, bool]]:
        """Return who said of whom that it is a wolf (True) or good (False)."""
        found = ((speaker, _CLAIM.search(text)) for speaker, text in self.said)
        return [(speaker, one[1], one[2] == "a wolf") for speaker, one in found if one]

    @property
    def out(self) -> str:
        """Player with most votes; empty if two have as many."""
        first, second, *_ = [*Counter(self.votes.values()).most_common(2), ("", 0), ("", 0)]
        return "" if first[1] == second[1] else first[0]

    @property
    def winner(self) -> str:
        return "villagers" if self.out in self._task["wolves"] else "wolves"
