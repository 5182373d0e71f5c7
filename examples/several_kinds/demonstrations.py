"""The demonstrations of three tutorials, mixed; each chat has the tools of its own kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from examples.retrieval import demonstrations as facts
from examples.shell_sandbox import demonstrations as files
from examples.tool_api import demonstrations as apps

KINDS = (facts, files, apps)
RECIPE = {"steps": 420, "settling_steps": 90, "vocabulary": 896}
"""One model learns three formats, so its warm-up is longer."""


def demonstrations(dice: random.Random) -> Iterator[dict[str, Any]]:
    return _mix(dice, lambda kind: kind.demonstrations(dice))


def copying(dice: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the chats of the first steps, which mostly copy."""
    return _mix(dice, lambda kind: kind.copying(dice))


def _mix(dice: random.Random, begin: Callable[[Any], Iterator[list[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    streams = [(begin(kind), kind.TOOLS) for kind in KINDS]
    while True:
        chats, tools = dice.choice(streams)
        yield {"messages": next(chats), "tools": tools}
