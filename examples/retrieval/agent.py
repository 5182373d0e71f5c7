"""An agent that may search a corpus before it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from examples.retrieval.environment import TOOLS, Corpus, corpus, score
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

POOL = DefaultHttpxClient()
"""Connections shared by all episodes of the process."""
SYSTEM = {
    "toy": "Answer the question.",
    "full": (
        "Answer the question from the texts that the search finds; a question may take several searches. "
        "Give the answer, one word, in tags: <answer>Paris</answer>"
    ),
}
MAX_TURNS = {"toy": 3, "full": 10}
MAX_TOKENS = {"toy": 48, "full": 512}


def opening(size: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM[size]}, {"role": "user", "content": question}]


def run_tool(texts: Corpus, name: str, arguments: str) -> str:
    """Run a tool call; mistakes of the model come back as text that it can read."""
    if name != "search":
        return f"error: no tool {name}"
    try:
        return texts.search(json.loads(arguments)["query"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return 'error: give {"query": "..."}'


def attempt(ep: Episode, tool: Callable[[Corpus, str, str], str] = run_tool) -> Outcome:
    task: dict[str, Any] = ep.payload
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL)
    messages: list[Any] = opening(task["size"], task["question"])
    searches = 0
    for _turn in range(MAX_TURNS[task["size"]]):
        answer = model.chat.completions.create(
            model=ep.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS[task["size"]]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            reward = score(task, message.content or "")
            return Outcome(reward, success=reward == 1.0, metrics={"searches": searches})
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls:
            result = tool(corpus(task["size"]), call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            searches += 1
    return Outcome(0.0, success=False, metrics={"searches": searches})
