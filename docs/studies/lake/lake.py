"""Tasks and agents of the studies on FrozenLake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from examples.frozen_lake.agent import POOL, opening, read_move
from examples.frozen_lake.environment import Lake, tasks
from openai import OpenAI

from swarmq import Episode, Outcome


def train() -> Iterator[dict[str, Any]]:
    return tasks("train", 400)


def held_out() -> Iterator[dict[str, Any]]:
    return tasks("held_out", 32)


def plain(ep: Episode) -> Outcome:
    """Reward 1 on the goal, else 0."""
    return walk(ep, shaping=0.0)


def shaped(ep: Episode) -> Outcome:
    """Reward 1 on the goal, else up to 0.5 for the share of the way to it."""
    return walk(ep, shaping=0.5)


def walk(ep: Episode, *, shaping: float) -> Outcome:
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL, max_retries=4)
    lake = Lake(ep.payload)
    messages = opening(lake)
    first = way(lake.at, ep.payload)
    while not lake.over:
        answer = model.chat.completions.create(model=ep.model, messages=messages)
        said = answer.choices[0].message.content or ""
        lake.step(read_move(said))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": lake.describe()}]
    reached = lake.over == "goal"
    near = max(first - way(lake.at, ep.payload), 0) / first
    return Outcome(1.0 if reached else shaping * near, success=reached)


def way(at: tuple[int, int], task: dict[str, Any]) -> int:
    """Return the number of moves to the goal, were there no holes."""
    return abs(at[0] - task["goal"][0]) + abs(at[1] - task["goal"][1])
