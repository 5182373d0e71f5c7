"""An agent that may use a calculator before it answers."""

from __future__ import annotations

import json
from typing import Any

from examples.grade_school_maths.environment import TOOLS, calculate, score
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

POOL = DefaultHttpxClient()
"""Connections shared by all episodes of the process."""
SYSTEM = {
    "toy": "Solve the problem.",
    "full": (
        "Solve the problem. Think first, and use the calculator for every calculation. "
        "Then give the final number in tags: <answer>12</answer>"
    ),
}
MAX_TURNS = {"toy": 3, "full": 8}
MAX_TOKENS = {"toy": 48, "full": 1024}


def opening(task: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM[task["size"]]}, {"role": "user", "content": task["question"]}]


def run_tool(name: str, arguments: str) -> str:
    """Run a tool call; mistakes of the model come back as text that it can read."""
    if name != "calculate":
        return f"error: no tool {name}"
    try:
        return calculate(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"error: {error}"


def attempt(ep: Episode) -> Outcome:
    task: dict[str, Any] = ep.payload
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL)
    messages: list[Any] = opening(task)
    calls = 0
    for _turn in range(MAX_TURNS[task["size"]]):
        answer = model.chat.completions.create(
            model=ep.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS[task["size"]]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            reward = score(task, message.content or "")
            return Outcome(reward, success=reward == 1.0, metrics={"tool_calls": calls})
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            calls += 1
    return Outcome(0.0, success=False, metrics={"tool_calls": calls})
