"""The work that swarmq, verl and TRL all do. Imports nothing, because every peer reads it in an environment of its own."""

from __future__ import annotations

import random

TURNS = 8
"""Number of model calls of an episode."""
SAMPLED = 128
"""Number of sampled tokens of a call; the end of a turn is ignored, so every call has as many."""
WORDS = 24
"""Words of an observation: about 64 tokens, and about 12 more for the turn around it."""
PROMPTS = 8
GROUP_SIZE = 8
EPISODES = PROMPTS * GROUP_SIZE
"""Number of episodes of a step."""
LONGEST_PROMPT = 256
LONGEST_RESPONSE = 2048
"""Largest number of tokens of an episode's sampled calls and of the observations between them."""
PASS_TOKENS = 16384
LEARNING_RATE = 1e-6
VOCABULARY = ("sum", "of", "is", "one", "two", "three", "four")


def observation(dice: random.Random) -> str:
    """Return what an agent reads between two calls, as the agents of benchmarks/loop/agent.py do."""
    return " ".join(dice.choice(VOCABULARY) for _ in range(WORDS))


def prompt(number: int) -> list[dict[str, str]]:
    """Return the first message of a task."""
    return [{"role": "user", "content": observation(random.Random(f"t{number}"))}]


def next_turn(text: str, turn_end: str) -> str:
    """Return the text that follows a call which was cut off: the end of its turn, then `text`, the rendered observation."""
    return f"{turn_end}\n{text}"
