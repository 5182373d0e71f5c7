"""Three kinds of tasks in one run, each with its own agent and reward (docs/tutorials/five-examples.md).

swarmq up examples/cocktail.toml
swarmq feed runs/cocktail "reasoning-gym:chain_sum?size=1000" --kind math
swarmq feed runs/cocktail "reasoning-gym:letter_counting?size=1000" --kind words
swarmq feed runs/cocktail "reasoning-gym:syllogism?size=1000" --kind logic
swarmq worker math=examples.cocktail:math words=examples.cocktail:words logic=examples.cocktail:logic
"""

from __future__ import annotations

import asyncio
from typing import Any

import reasoning_gym

from swarmq import AsyncEpisode, Episode, Outcome, ask, ask_async
from swarmq.rewards import combine, length_penalty

THINKING_S = 60.0


def score(entry: dict[str, Any], text: str) -> float:
    """Return reasoning-gym's score for the last line of an answer."""
    last = (text.strip().splitlines() or [""])[-1]
    return float(reasoning_gym.get_score_answer_fn(entry["dataset"])(last, entry))


def math(ep: Episode) -> Outcome:
    """Ask one question; long answers reduce the reward."""
    text = ask(ep, f"{ep.payload['question']}\nThink, then write the result on the last line.")
    return combine({"right": score(ep.payload, text), "length": length_penalty(len(text), free=400, full=2000)})


def words(ep: Episode) -> Outcome:
    """Ask, then let the model check its own answer in a second turn."""
    messages = [{"role": "user", "content": ep.payload["question"]}]
    first = ask(ep, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Check it. Only the answer."}]
    second = ask(ep, messages)
    return combine({"right": score(ep.payload, second), "first": score(ep.payload, first)}, {"first": 0.2})


async def logic(ep: AsyncEpisode) -> float:
    """Ask with a time limit, as a coroutine. Beyond the limit the episode fails and is attempted again; it is not scored 0."""
    async with asyncio.timeout(THINKING_S):
        return score(ep.payload, await ask_async(ep, ep.payload["question"]))
