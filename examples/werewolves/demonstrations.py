"""Conversations of players by rule, from which the toy model learns how wolves and villagers talk; whom to believe is left to the games."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples.werewolves import characters
from examples.werewolves.agent import news, opening
from examples.werewolves.environment import Game, draw

RECIPE = {"steps": 160, "settling_steps": 60}
SPEECHES = {"honest": 0.3, "silent": 0.3, "loud": 0.2, "kind": 0.2}
VOTES = {"sure": 0.3, "gullible": 0.2, "wary": 0.2, "careless": 0.3}
"""Character -> share of the acts; each act of a player may be another character's."""


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    while True:
        yield from play(Game(draw(dice, "toy")), dice, SPEECHES, VOTES)


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the chats of the first steps, which mostly copy a name from what was heard."""
    while True:
        yield from play(Game(draw(dice, "toy")), dice, {**SPEECHES, "honest": 2.0}, {**VOTES, "sure": 2.0})


def play(
    game: Game, dice: random.Random, speeches: dict[str, float], votes: dict[str, float]
) -> list[list[dict[str, Any]]]:
    """Return the conversations of all players of one game."""
    talks = {name: opening(game, name) for name in game.players}
    heard = {}
    for name in game.players:
        said = characters.speak(draw_character(dice, speeches), game, name, dice)
        talks[name] += exchange(news(game, name, 0, "Speak."), said)
        heard[name] = len(game.said)
        game.speak(name, said)
    for name in game.players:
        said = characters.vote(draw_character(dice, votes), game, name, dice)
        talks[name] += exchange(news(game, name, heard[name], "Vote."), said)
    return list(talks.values())


def draw_character(dice: random.Random, shares: dict[str, float]) -> str:
    return dice.choices(list(shares), list(shares.values()))[0]


def exchange(request: str, said: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": request}, {"role": "assistant", "content": said}]
