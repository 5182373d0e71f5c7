"""An agent for a queue of tasks, on any number of machines.

    swarmq feed runs/NAME examples/data/questions.jsonl --epochs 3 --seed 0
    swarmq worker examples.queue_worker:attempt --concurrency 32        # on every machine

If a worker is killed, its tasks go to other workers.
"""

from __future__ import annotations

from openai import OpenAI

from swarmq import Episode, Outcome


def attempt(ep: Episode) -> Outcome:
    """Answer one question; `ep.payload` is one line of the data set."""
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    answer = model.chat.completions.create(
        model=ep.model,
        messages=[
            {"role": "system", "content": "Answer with one word."},
            {"role": "user", "content": ep.payload["question"]},
        ],
    )
    words = (answer.choices[0].message.content or "").strip(" .!").lower()
    right = words == ep.payload["answer"]
    return Outcome(1.0 if right else -0.1 * min(len(words.split()), 5), success=right)
