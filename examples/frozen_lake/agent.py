"""The agent: one conversation for one walk, a move in every turn. The reward is 1 on the goal, else 0."""

from __future__ import annotations

from typing import Any

from examples.frozen_lake.environment import MOVES, Lake
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

SYSTEM = "Walk to the goal. Avoid holes. Answer with a direction."
POOL = DefaultHttpxClient()
"""Connections that all episodes share."""


def attempt(ep: Episode) -> Outcome:
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL, max_retries=4)
    lake = Lake(ep.payload)
    messages = opening(lake)
    moves = 0
    while not lake.over:
        answer = model.chat.completions.create(model=ep.model, messages=messages)
        said = answer.choices[0].message.content or ""
        lake.step(read_move(said))
        moves += 1
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": lake.describe()}]
    reached = lake.over == "goal"
    return Outcome(
        float(reached),
        success=reached,
        metrics={"moves": moves, "in_hole": lake.over == "hole", "late": lake.over == "late"},
    )


def opening(lake: Lake) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": lake.describe()}]


def read_move(text: str) -> str:
    """Return the move that a reply names; empty unless its last line is one move and nothing else."""
    last = (text.strip().splitlines() or [""])[-1].strip(" .!*").lower()
    return last if last in MOVES else ""
