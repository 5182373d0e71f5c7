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
    return tasks("held_out", 96)


def step(ep: Episode) -> Outcome:
    """Make one move, so that an episode is one call. Reward 1 for the first of up, right, down, left that comes nearer to the goal and
    not into a hole, else 0."""
    lake = Lake(ep.payload)
    good = [move for move, there in lake.neighbours().items() if move in lake.towards() and there in {"ice", "goal"}]
    is_first = read_move(_ask(ep, opening(lake))) == good[0]
    return Outcome(float(is_first), success=is_first)


def plain(ep: Episode) -> Outcome:
    """Walk to the end. Reward 1 on the goal, else 0."""
    return walk(ep, shaping=0.0)


def shaped(ep: Episode) -> Outcome:
    """Walk to the end. Reward 1 on the goal, else up to 0.5 for the share of the way to it."""
    return walk(ep, shaping=0.5)


def walk(ep: Episode, *, shaping: float) -> Outcome:
    lake = Lake(ep.payload)
    messages = opening(lake)
    first = way(lake.at, ep.payload)
    while not lake.over:
        said = _ask(ep, messages)
        lake.step(read_move(said))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": lake.describe()}]
    reached = lake.over == "goal"
    near = max(first - way(lake.at, ep.payload), 0) / first
    return Outcome(1.0 if reached else shaping * near, success=reached)


def way(at: tuple[int, int], task: dict[str, Any]) -> int:
    """Return the number of moves to the goal, were there no holes."""
    return abs(at[0] - task["goal"][0]) + abs(at[1] - task["goal"][1])


def _ask(ep: Episode, messages: list[Any]) -> str:
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL, max_retries=4)
    return model.chat.completions.create(model=ep.model, messages=messages).choices[0].message.content or ""
