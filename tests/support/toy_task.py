"""A task that a model with random weights learns within some twenty steps: to begin an answer with a lower-case letter.

An answer is right or wrong, so there is no reward between 0 and 1 at which a policy could settle. More than a quarter of the
tiny model's tokens are right, so nearly every group has answers of both sorts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from openai import OpenAI

from swarmq import Episode, SwarmClient

GROUP_SIZE, TASKS = 8, 8
"""Attempts of a task, and tasks of a round."""
GAIN, ROUNDS = 0.5, 16
"""Rise of a round's mean reward, and the number of rounds by which it must have come. The first round's reward is about 0.3, with a
standard error of 0.06; a learned policy's is 1."""


def toy_settings(model: str | Path, *, run: str = "toy") -> dict[str, Any]:
    """Return the settings of a job in which `model` learns the task."""
    policy = {
        "model": str(model),
        "engine": {"dtype": "float32", "max_model_len": 512},
        "sampling": {"max_tokens": 8},
        "train": {"learning_rate": 1e-3, "warmup_steps": 0, "checkpoint_every": 2},
    }
    groups = {"group_size": GROUP_SIZE, "groups_per_batch": 2}
    return {"run": run, "groups": groups, "policies": {"main": policy}}


class Toy:
    """Agents at work on the task, and what they remember."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        """Ids of all episodes that were attempted to their end."""
        self.rewards: list[float] = []
        """Mean reward of each round."""

    def attempt(self, ep: Episode) -> float:
        with OpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=8, timeout=300) as client:
            asked = client.chat.completions.create(model=ep.model, messages=[{"role": "user", "content": "write"}])
        self.ended.append(ep.episode_id)
        return float("a" <= (asked.choices[0].message.content or "")[:1] <= "z")

    def play(self, client: SwarmClient) -> None:
        """Attempt a round of new tasks."""
        tasks = [{"id": f"{time.time_ns()}-{number}"} for number in range(TASKS)]
        summary = client.run_episodes_until_all_complete(tasks, self.attempt, concurrency=16, progress=False)
        assert (summary.given_up, summary.finished) == (0, TASKS * GROUP_SIZE)
        self.rewards.append(summary.reward_mean)

    def learn(self, client: SwarmClient) -> None:
        """Play until the reward has risen by GAIN."""
        while not self.rewards or self.rise < GAIN:
            assert len(self.rewards) < ROUNDS, f"the model does not learn: {self.rewards}"
            self.play(client)

    @property
    def rise(self) -> float:
        """By how much the reward has risen since the first round."""
        return self.rewards[-1] - self.rewards[0]
