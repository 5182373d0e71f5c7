"""Chats that teach the toy model three ways to serve a user: to ask for what is missing, to ask for something else, and to guess."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples.ask_user.agent import opening
from examples.ask_user.environment import FIELDS, QUESTIONS, User, draw

WAYS = ("ask", "ask anything", "guess")


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    return _chats(dice, (0.3, 0.25, 0.45))


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the chats of the first steps, which mostly copy what the user said into the booking."""
    return _chats(dice, (0.8, 0.15, 0.05))


def _chats(dice: random.Random, weights: tuple[float, ...]) -> Iterator[list[dict[str, Any]]]:
    while True:
        yield chat(draw(dice, "toy"), dice.choices(WAYS, weights)[0], dice)


def chat(task: dict[str, Any], way: str, dice: random.Random) -> list[dict[str, Any]]:
    """Return a chat about a request. The booking has a guess in place of what the user has not told."""
    messages, user = opening(task), User(task)
    field = None
    if way == "ask anything":
        field = dice.choice(FIELDS["toy"])
    elif way == "ask" and task["missing"]:
        field = task["missing"][0]
    if field:
        question = QUESTIONS[field]
        messages += [{"role": "assistant", "content": question}, {"role": "user", "content": user.reply(question)}]
    guess = draw(dice, "toy")["booking"]
    values = [
        guess[name] if name in task["missing"] and name not in user.told else value
        for name, value in task["booking"].items()
    ]
    return [*messages, {"role": "assistant", "content": f"book {', '.join(values)}"}]
