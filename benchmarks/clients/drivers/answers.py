"""What all drivers share: where to ask, what to ask, and the file of JSON lines that they tell every answer to."""

import json
import os
from pathlib import Path
from typing import Any

BASE_URL, KEY = os.environ["AGENT_BASE_URL"], os.environ["AGENT_KEY"]
ANTHROPIC_URL = BASE_URL.removesuffix("/v1")
MODEL = "main"
QUESTION, FOLLOW_UP = "What is 1 + 2 + 3 + 4?", "And what is that in words?"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def tell(text: str | None = "", calls: Any = (), parsed: Any = None) -> None:
    """Write one answer down. `calls` are pairs of name and arguments, `parsed` is what a library made of a structured answer."""
    told = [{"name": name, "arguments": arguments} for name, arguments in calls]
    with Path(os.environ["AGENT_ANSWERS"]).open("a") as file:
        file.write(json.dumps({"text": text or "", "calls": told, "parsed": parsed}) + "\n")
