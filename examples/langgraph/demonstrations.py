"""Chats that teach the toy model three ways to answer: look up and obey the rule, look up and do anything, or guess."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from examples.langgraph import environment
from examples.langgraph.agent import OFFERED, SYSTEM
from examples.langgraph.environment import ACTIONS, Desk

WAYS = ("obey", "look up", "guess")
TOOLS = OFFERED


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    return _chats(dice, (0.15, 0.4, 0.45))


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the chats of the first steps, which mostly copy the number of the order into a call."""
    return _chats(dice, (0.15, 0.75, 0.1))


def _chats(dice: random.Random, weights: tuple[float, ...]) -> Iterator[list[dict[str, Any]]]:
    while True:
        desk = environment.build({"size": "toy", "seed": environment.WARMUP_SEED + dice.randrange(10**9)})
        yield chat(desk, dice.choices(WAYS, weights)[0], dice)


def chat(desk: Desk, way: str, dice: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM["toy"]},
        {"role": "user", "content": desk.question},
    ]
    if way != "guess":
        function = {"name": "lookup", "arguments": json.dumps({"order": desk.asked})}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": desk.lookup(desk.asked)},
        ]
    action = desk.right if way == "obey" else dice.choice(ACTIONS)
    return [*messages, {"role": "assistant", "content": f"<answer>{action}</answer>"}]
