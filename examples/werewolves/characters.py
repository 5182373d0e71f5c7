"""Players by rule: the toy model copies some of them, and held-out games are played against others.

Speech                                          Vote
  honest   the seer tells what it knows           gullible   for the player who was last called a wolf
  silent   says nothing                           sure       for the wolf that the seer knows, else as the gullible
  loud     calls anyone a wolf                    wary       for whoever called it a wolf, else for anyone not called good
  kind     calls anyone good                      careless   for anyone
"""

from __future__ import annotations

import random

from examples.werewolves.environment import SILENCE, Game


def speak(character: str, game: Game, player: str, dice: random.Random) -> str:
    secret = game.secret(player).partition(". ")[2].rstrip(".")
    if character == "honest" and secret:
        return secret
    if character == "loud":
        return f"{dice.choice(game.others(player))} is a wolf"
    if character == "kind":
        return f"{dice.choice(game.others(player))} is good"
    return SILENCE


def vote(character: str, game: Game, player: str, dice: random.Random) -> str:
    others, claims = game.others(player), game.claims()
    known = [name for name in others if game.secret(player) == f"seer. {name} is a wolf."]
    called = [name for _, name, is_wolf in claims if is_wolf and name != player]
    accusers = [speaker for speaker, name, is_wolf in claims if is_wolf and name == player]
    unnamed = [name for name in others if (name, False) not in {(one, is_wolf) for _, one, is_wolf in claims}]
    if character == "sure" and known:
        return known[0]
    if character in {"sure", "gullible"} and called:
        return called[-1]
    if character == "wary":
        return dice.choice(accusers or unnamed or others)
    return dice.choice(others)
