"""Three kinds of tasks in one run, each with an agent, a reward and a pace of its own (docs/tutorial.md).

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
    """What reasoning-gym makes of the last line of an answer."""
    last = (text.strip().splitlines() or [""])[-1]
    return float(reasoning_gym.get_score_answer_fn(entry["dataset"])(last, entry))


def math(ep: Episode) -> Outcome:
    """One question, one answer, and long answers cost."""
    text = ask(ep, f"{ep.payload['question']}\nThink, then write the result on the last line.")
    return combine({"right": score(ep.payload, text), "length": length_penalty(len(text), free=400, full=2000)})


def words(ep: Episode) -> Outcome:
    """Two turns: the model looks at its own answer again."""
    messages = [{"role": "user", "content": ep.payload["question"]}]
    first = ask(ep, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Check it. Only the answer."}]
    second = ask(ep, messages)
    return combine({"right": score(ep.payload, second), "first": score(ep.payload, first)}, {"first": 0.2})


async def logic(ep: AsyncEpisode) -> float:
    """A coroutine with a time limit; beyond it the episode fails and is attempted again, it is not scored 0."""
    async with asyncio.timeout(THINKING_S):
        return score(ep.payload, await ask_async(ep, ep.payload["question"]))
