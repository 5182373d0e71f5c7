"""One attempt at a task: ask the model, score the answer, return a reward. Replace it with your own agent.

    swarmq worker agent:attempt --concurrency 32

To change this file, stop the worker, edit, and start it again: training continues meanwhile. Instead of `ask` you can use any
library for OpenAI-compatible servers:

    client = openai.OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    client.chat.completions.create(model=ep.model, messages=[...])
"""

from __future__ import annotations

import re

from swarmq import Episode, Outcome, ask


def attempt(ep: Episode) -> Outcome:
    """Attempt one task; `ep.payload` is one line of tasks.jsonl."""
    text = ask(ep, f"{ep.payload['question']} End with the number alone on a line of its own.")
    return reward(text, ep.payload["answer"])


def reward(text: str, answer: int) -> Outcome:
    """Return 1 for the right number on the last line, 0.1 for another number there, else 0."""
    last = text.strip().rpartition("\n")[2].strip()
    right = last == str(answer)
    is_number = re.fullmatch(r"-?\d+", last) is not None
    return Outcome(1.0 if right else 0.1 * is_number, success=right)
