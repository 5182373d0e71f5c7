"""Chats that teach the toy model three ways to work: read the right documentation first, read that of another app, or guess."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from examples.tool_api import environment
from examples.tool_api.agent import opening
from examples.tool_api.environment import World

TOOLS = environment.TOOLS

WAYS = ("read", "read another", "guess")


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    return _chats(dice, (0.25, 0.25, 0.5))


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the chats of the first steps, which mostly copy an endpoint from the documentation into a call."""
    return _chats(dice, (0.8, 0.1, 0.1))


def _chats(dice: random.Random, weights: tuple[float, ...]) -> Iterator[list[dict[str, Any]]]:
    while True:
        world = environment.build({"size": "toy", "seed": environment.WARMUP_SEED + dice.randrange(10**9)})
        yield chat(world, dice.choices(WAYS, weights)[0], dice)


def chat(world: World, way: str, dice: random.Random) -> list[dict[str, Any]]:
    app, value = world.subject
    messages = opening("toy", world.question)
    endpoint = dice.choice(environment.VERBS["put"])
    if way != "guess":
        read = app if way == "read" else dice.choice(environment.DEVICES)
        endpoint = run(world, messages, "docs", {"app": read}).split()[1].partition("(")[0]
    run(world, messages, "call", {"app": app, "endpoint": endpoint, "value": value})
    return [*messages, {"role": "assistant", "content": "done"}]


def run(world: World, messages: list[dict[str, Any]], tool: str, arguments: dict[str, str]) -> str:
    """Add a call of a tool and its result to the chat, and return the result."""
    call_id = f"c{len(messages)}"
    function = {"name": tool, "arguments": json.dumps(arguments)}
    result = world.run(tool, arguments)
    messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
    return result
