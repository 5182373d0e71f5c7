"""Chats that teach the toy model how traders of four characters talk; which character to be is left to self-play.

`fair` offers between the numbers and accepts what is good for it, `greedy` asks for far more and never accepts, `careless` accepts
anything, `shy` leaves. None of them knows the other side's number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples.negotiation.agent import BEGIN, opening
from examples.negotiation.environment import HIGHEST, SIDES, Bargain, draw

CHARACTERS = ("fair", "greedy", "careless", "shy")
WEIGHTS = (0.35, 0.3, 0.2, 0.15)


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    while True:
        yield from play(draw(dice, "toy"), dice)


def play(task: dict[str, Any], dice: random.Random) -> list[list[dict[str, Any]]]:
    """Return the conversations of the sides that move in one bargain, in which each move may have another character."""
    talks = {side: opening(task, side) for side in SIDES}
    bargain, heard = Bargain(task), BEGIN
    while not bargain.ended:
        side = bargain.turn
        own = task["cost"] if side == "seller" else task["value"]
        said = choose(dice.choices(CHARACTERS, WEIGHTS)[0], side, own, bargain.offer, dice)
        talks[side] += [{"role": "user", "content": heard}, {"role": "assistant", "content": said}]
        heard = bargain.move(said)
    return [talk for talk in talks.values() if len(talk) > 1]


def choose(character: str, side: str, own: int, offer: int | None, dice: random.Random) -> str:
    """Return a move of a character whose number is `own`, after an `offer` of the other side."""
    highest = HIGHEST["toy"]
    is_good = offer is not None and (offer > own if side == "seller" else offer < own)
    if character == "shy":
        return "leave"
    if offer is not None and (character == "careless" or (character == "fair" and is_good)):
        return "accept"
    if character == "greedy":
        return f"offer {highest if side == 'seller' else 0}"
    if character == "careless":
        return f"offer {dice.randrange(highest + 1)}"
    step = dice.randint(1, 2)
    return f"offer {min(highest, own + step) if side == 'seller' else max(0, own - step)}"
