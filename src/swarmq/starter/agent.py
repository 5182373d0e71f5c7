"""One attempt at a task: ask the model, look at the answer, return a reward. Put your own agent in its place.

    swarmq worker agent:attempt --concurrency 32

Stop the worker, change this file, start it again: training goes on meanwhile. Any library that speaks to an OpenAI-compatible
server does instead of `ask`:

    client = openai.OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    client.chat.completions.create(model=ep.model, messages=[...])
"""

from __future__ import annotations

import re

from swarmq import Episode, Outcome, ask


def attempt(ep: Episode) -> Outcome:
    """`ep.payload` is one line of tasks.jsonl."""
    text = ask(ep, f"{ep.payload['question']} End with the number alone on a line of its own.")
    return reward(text, ep.payload["answer"])


def reward(text: str, answer: int) -> Outcome:
    """1 for the right number at the end, 0.1 for another number there, else 0."""
    last = text.strip().rpartition("\n")[2].strip()
    right = last == str(answer)
    is_number = re.fullmatch(r"-?\d+", last) is not None
    return Outcome(1.0 if right else 0.1 * is_number, success=right)
