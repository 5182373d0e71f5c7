"""An agent with a shell in a folder of its own."""

from __future__ import annotations

import json
from typing import Any

from examples.shell_sandbox import shell
from examples.shell_sandbox.environment import TOOLS, build, score
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

POOL = DefaultHttpxClient()
"""Connections shared by all episodes of the process."""
SYSTEM = {
    "toy": "Use the shell.",
    "full": (
        "You have a shell in a folder. Look at the files before you answer or change anything. "
        "If you are asked something, give only the answer in tags at the end: <answer>12</answer>. Otherwise say that it is done."
    ),
}
MAX_TURNS = {"toy": 4, "full": 15}
MAX_TOKENS = {"toy": 48, "full": 512}


def opening(size: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM[size]}, {"role": "user", "content": question}]


def run_tool(size: str, files: dict[str, str], name: str, arguments: str) -> str:
    """Run a tool call; mistakes of the model come back as text that it can read."""
    if name != "run":
        return f"error: no tool {name}"
    try:
        return shell.run(size, files, str(json.loads(arguments)["command"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return 'error: give {"command": "..."}'


def attempt(ep: Episode) -> Outcome:
    task: dict[str, Any] = ep.payload
    size, problem = task["size"], build(task)
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL)
    messages: list[Any] = opening(size, problem.question)
    files, commands = dict(problem.files), 0
    for _turn in range(MAX_TURNS[size]):
        answer = model.chat.completions.create(
            model=ep.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS[size]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            reward = score(problem, files, message.content or "")
            return Outcome(reward, success=reward == 1.0, metrics={"commands": commands})
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls:
            result = run_tool(size, files, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            commands += 1
    return Outcome(0.0, success=False, metrics={"commands": commands})
