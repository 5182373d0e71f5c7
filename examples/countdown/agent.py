"""The agent: it may call a calculator as often as it has turns, and answers with an expression in <answer> tags."""

from __future__ import annotations

import json
import re
from typing import Any

from examples.countdown.environment import question, run_calculator, score
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

SYSTEM = "Reach the target with the numbers. Answer as <answer>1 + 2</answer>."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MAX_TURNS = 6
POOL = DefaultHttpxClient()
"""Connections that all episodes share."""


def attempt(ep: Episode) -> Outcome:
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL, max_retries=4)
    messages, calls = opening(ep.payload), 0
    for _ in range(MAX_TURNS):
        answer = model.chat.completions.create(model=ep.model, messages=messages, tools=TOOLS)
        said = answer.choices[0].message
        if not said.tool_calls:
            reward = score(ep.payload, read_answer(said.content or ""))
            return Outcome(reward, success=reward == 1.0, metrics={"calls": calls})
        messages.append(said.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in said.tool_calls:
            calls += 1
            result = run_tool(ep.payload, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return Outcome(0.0, success=False, metrics={"calls": calls})


def opening(task: dict[str, Any]) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(task)}]


def read_answer(text: str) -> str:
    """Return what is in the last <answer> tags; empty if there are none."""
    found = ANSWER.findall(text)
    return found[-1] if found else ""


def run_tool(task: dict[str, Any], name: str, arguments: str) -> str:
    """Run a tool call; mistakes of the model come back as text that it can read."""
    if name != "calculate":
        return f"error: no tool {name}"
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "error: no expression"
    return run_calculator(task, expression) if isinstance(expression, str) else "error: the expression is no text"
