"""An agent for made tasks: ask the question, check the answer. `swarmq worker swarmq.tasks.agent:attempt`."""

from __future__ import annotations

from swarmq.client.ask import ask
from swarmq.client.episodes.episode import Episode
from swarmq.outcome import Outcome
from swarmq.tasks.checks import score


def attempt(ep: Episode) -> Outcome:
    """Attempt one line of tasks.jsonl."""
    return score(ep.payload, ask(ep, ep.payload["question"])).outcome()
