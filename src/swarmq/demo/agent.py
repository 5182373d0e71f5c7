"""The demo's agent: plain Python with the `openai` SDK and a tool to call between turns.

The tool computes the first operation of an expression and returns the rest: `12 + 30 - 2` becomes `42 - 2`. A problem with
three numbers therefore takes two calls and then an answer.

The agent knows nothing of training: it gets a `base_url` and an `api_key`, and returns a reward.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from typing import Any

import msgspec
from openai import OpenAI

from swarmq.demo.problems import Problem, score

MAX_TURNS = 4
MAX_TOKENS = 40
SYSTEM = "Solve the problem."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "simplify",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
FIRST_OPERATION = re.compile(r"(-?\d{1,12}) ([-+*]) (-?\d{1,12})((?: [-+*] -?\d{1,12}){0,8})")


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one attempt."""

    reward: float
    success: bool
    turns: int
    tool_calls: int
    reply: str
    """Last text of the model; empty if it never stopped calling the tool."""


Reward = Callable[[Problem, str], float]


def concise_score(problem: Problem, reply: str) -> float:
    """Return the demo's changed reward: the honest score, plus a little for a right answer with nothing around the tags."""
    honest = score(problem, reply)
    bare = reply.startswith("<answer>") and reply.endswith("</answer>")
    return honest + (0.1 if honest and bare else 0.0)


def attempt(client: OpenAI, model: str, problem: Problem, *, reward: Reward = score) -> AgentResult:
    """Ask the model and run its tool calls, until it answers in words."""
    messages: list[Any] = opening(problem.question)
    tool_calls = 0
    for turn in range(1, MAX_TURNS + 1):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,  # type: ignore[arg-type]
            temperature=1.0,
            max_tokens=MAX_TOKENS,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            reply = message.content or ""
            return AgentResult(
                reward=reward(problem, reply),
                success=score(problem, reply) == 1.0,
                turns=turn,
                tool_calls=tool_calls,
                reply=reply,
            )
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            tool_calls += 1
    return AgentResult(reward=reward(problem, ""), success=False, turns=MAX_TURNS, tool_calls=tool_calls, reply="")


def opening(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def run_tool(name: str, arguments: str) -> str:
    """Run a tool call; mistakes of the model come back as text that it can read."""
    if name != "simplify":
        return f"error: no tool {name}"
    try:
        return simplify(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error: write it as 1 + 2 - 3"


def simplify(expression: str) -> str:
    """Return the expression after its first operation. Raises ValueError unless it is whole numbers joined by + and -, or by *."""
    match = FIRST_OPERATION.fullmatch(expression)
    if match is None or (" * " in expression and re.search(r" [-+] ", expression)):
        raise ValueError(f"not whole numbers joined by + and -, or by *: {expression!r}")
    left, sign, right, rest = match.groups()
    return f"{OPERATORS[sign](int(left), int(right))}{rest}"
