"""Two policies in one game: `wolves` plays the wolves, `villagers` everyone else, and each is trained for its own side to win.

Every player has a conversation of its own, in which it learns its role, hears the others, speaks and votes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from examples.werewolves import characters
from examples.werewolves.environment import ROUNDS, SIDES, Game
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

POOL = DefaultHttpxClient()
"""Connections that all episodes share."""
MAX_TOKENS = {"toy": 12, "full": 1024}
RULES = (
    " Some of the players are wolves, who know each other; one villager is the seer, who knows one player's role. Everyone speaks,"
    " then everyone votes. The villagers win if a wolf gets most votes, else the wolves win. Think, then write one line: what the"
    " others shall hear, or, when you are asked to vote, only a name."
)
SCRIPT = {"wolves": (("loud", "silent"), ("gullible",)), "villagers": (("honest",), ("sure",))}
"""Side -> characters of fixed opponents when they speak, and when they vote."""


class Player:
    """A player whose policy is asked. Its conversation holds what it has heard so far."""

    def __init__(self, name: str, game: Game, ask: Callable[[list[Any]], str]) -> None:
        self._name, self._game, self._ask = name, game, ask
        self._heard = 0
        self._talk = opening(game, name)

    def answer(self, request: str) -> str:
        self._talk.append({"role": "user", "content": news(self._game, self._name, self._heard, request)})
        self._heard = len(self._game.said)
        said = self._ask(self._talk)
        self._talk.append({"role": "assistant", "content": said})
        return said


def opening(game: Game, player: str) -> list[dict[str, Any]]:
    system = f"You are {player}, {game.secret(player)}"
    if game.size == "full":
        system += f" With you are {', '.join(game.others(player))}.{RULES}"
    return [{"role": "system", "content": system}]


def news(game: Game, player: str, heard: int, request: str) -> str:
    """Return what the others have said since, and what the player is asked for."""
    return "\n".join([*(f"{name}: {text}" for name, text in game.said[heard:] if name != player), request])


def attempt(ep: Episode) -> Outcome:
    """Play a game in which both sides are trained."""
    game = play(ep, SIDES)
    villagers_won = game.winner == "villagers"
    return Outcome(
        rewards={"villagers": float(villagers_won), "wolves": float(not villagers_won)},
        success=villagers_won,
        metrics=measure(game),
    )


def attempt_against_script(ep: Episode) -> Outcome:
    """Play one side of a game against players by rule; the reward is 1 if the policy's side wins."""
    side = ep.payload["side"]
    game = play(ep, (side,))
    won = game.winner == side
    return Outcome(float(won), success=won, metrics={f"{side}_won": won, **measure(game)})


def play(ep: Episode, policies: tuple[str, ...]) -> Game:
    """Play a game to its end; sides that are not among `policies` follow the script."""
    game, dice = Game(ep.payload), random.Random(ep.payload["seed"])
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL)

    def ask_of(side: str) -> Callable[[list[Any]], str]:
        def ask(messages: list[Any]) -> str:
            answer = model.chat.completions.create(model=side, messages=messages, max_tokens=MAX_TOKENS[game.size])
            return answer.choices[0].message.content or ""

        return ask

    asked = {name: Player(name, game, ask_of(game.side(name))) for name in game.players if game.side(name) in policies}
    for _round in range(ROUNDS[game.size]):
        for name in game.players:
            speeches = SCRIPT[game.side(name)][0]
            said = (
                asked[name].answer("Speak.")
                if name in asked
                else characters.speak(dice.choice(speeches), game, name, dice)
            )
            game.speak(name, said)
    for name in game.players:
        votes = SCRIPT[game.side(name)][1]
        said = asked[name].answer("Vote.") if name in asked else characters.vote(dice.choice(votes), game, name, dice)
        game.vote(name, said)
    return game


def measure(game: Game) -> dict[str, float]:
    claims = game.claims()
    return {
        "accusations": sum(is_wolf for _, _, is_wolf in claims),
        "lies": sum(is_wolf != (game.side(name) == "wolves") for _, name, is_wolf in claims),
        "votes_for_wolves": sum(game.side(name) == "wolves" for name in game.votes.values()),
    }
