"""An agent that works in many apps through two tools: read an app's documentation, call one of its endpoints."""

from __future__ import annotations

import json
from typing import Any

from examples.tool_api.environment import TOOLS, World, build, score
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

POOL = DefaultHttpxClient()
"""Connections shared by all episodes of the process."""
SYSTEM = {
    "toy": "Use the apps.",
    "full": (
        "Do what the user asks by calling apps. The endpoints of an app are in its documentation; read it before the first "
        "call. When it is done, say so in one sentence."
    ),
}
MAX_TURNS = {"toy": 4, "full": 25}
MAX_TOKENS = {"toy": 48, "full": 512}


def opening(size: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM[size]}, {"role": "user", "content": question}]


def run_tool(world: World, name: str, arguments: str) -> str:
    try:
        return world.run(name, json.loads(arguments))
    except (ValueError, RecursionError):
        return "400: the arguments are not JSON"


def attempt(ep: Episode) -> Outcome:
    task: dict[str, Any] = ep.payload
    world = build(task)
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL)
    messages: list[Any] = opening(task["size"], world.question)
    calls = {"docs": 0, "call": 0}
    for _turn in range(MAX_TURNS[task["size"]]):
        answer = model.chat.completions.create(
            model=ep.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS[task["size"]]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls:
            name = call.function.name
            result = run_tool(world, name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            calls[name] = calls.get(name, 0) + 1
    reward = score(world)
    return Outcome(reward, success=reward == 1.0, metrics={"docs_read": calls["docs"], "calls": calls["call"]})
