"""Loops of tool calls whose text repeats itself, as agents' text does: demonstrations to train on, and the other side of a dialogue.

`CALLS` is the demo's loop: short calls that repeat an expression. `FILES` is a loop of edits: the agent writes a whole file at each
call, with one line changed, as agents that write code do.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from swarmq.demo import agent
from swarmq.demo import problems as arithmetic
from swarmq.demo.model_recipe import DemoRecipe
from swarmq.demo.warmup import demonstrate

Chat = dict[str, Any]
Message = dict[str, Any]


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    tools: list[dict[str, Any]]
    max_turns: int
    max_tokens: int
    """Of a turn."""
    tasks: Callable[[int], Iterator[Any]]
    """Endless tasks of a seed."""
    opening: Callable[[Any], list[Message]]
    answer: Callable[[Any, int, Message], str]
    """Return what the tool answers: to a task, a turn counted from 0, and a call."""
    longest: Callable[[Any], list[Message]]
    """Return the dialogue with most calls; tokenizers are made from such."""
    demonstrate: Callable[[Any, random.Random, float], list[Message]]
    """Return a dialogue; the share is that of turns that call the tool, where they may not."""

    def chat(self, task: Any, dice: random.Random, tool_share: float) -> Chat:
        return {"messages": self.demonstrate(task, dice, tool_share), "tools": self.tools}


def problems(seed: int) -> Iterator[arithmetic.Problem]:
    """Of both kinds in turn, never one that is trained or held out."""
    start = random.Random(seed).randrange(arithmetic.SPLIT_SIZE // 2)
    kinds = [arithmetic.problems(kind, "warmup", arithmetic.SPLIT_SIZE // 2, start=start) for kind in arithmetic.KINDS]
    return itertools.cycle(itertools.chain.from_iterable(zip(*kinds, strict=True)))


def _solve(problem: arithmetic.Problem, dice: random.Random, tool_share: float) -> list[Message]:
    """Call the tool before each next step with this chance, and end in the true answer."""
    expression, answer = arithmetic.solution(problem)
    calls = 0
    while dice.random() < tool_share:
        calls += 1
    return list(demonstrate(problem.question, expression, answer, calls=calls))


CALLS = Loop(
    tools=agent.TOOLS,
    max_turns=agent.MAX_TURNS,
    max_tokens=agent.MAX_TOKENS,
    tasks=problems,
    opening=lambda problem: list(agent.opening(problem.question)),
    answer=lambda _problem, _turn, call: agent.run_tool(call["function"]["name"], call["function"]["arguments"]),
    longest=lambda problem: list(demonstrate(problem.question, *arithmetic.solution(problem), calls=2)),
    demonstrate=_solve,
)

NAMES = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
NAMES += ["lambda", "mu", "nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon"]
EDITS = 3
WRITE = "write"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A file of numbers with names, and edits of one line each."""

    numbers: dict[str, int]
    edits: tuple[tuple[str, int], ...]

    def text(self, edits: int) -> str:
        """Return the file after that many edits."""
        return "\n".join(f"{name} = {number}" for name, number in (self.numbers | dict(self.edits[:edits])).items())

    def instruction(self, turn: int) -> str:
        return "Set {} to {}.".format(*self.edits[turn]) if turn < len(self.edits) else "Done."


def files(seed: int) -> Iterator[Task]:
    dice = random.Random(seed)
    while True:
        numbers = {name: dice.randint(10, 99) for name in dice.sample(NAMES, len(NAMES))}
        edits = tuple((name, dice.randint(10, 99)) for name in dice.sample(NAMES, EDITS))
        yield Task(numbers=numbers, edits=edits)


def _open(task: Task) -> list[Message]:
    return [{"role": "user", "content": f"{task.text(0)}\n{task.instruction(0)}"}]


def _edit(task: Task) -> list[Message]:
    messages = _open(task)
    for turn in range(EDITS):
        function = {"name": WRITE, "arguments": json.dumps({"text": task.text(turn + 1)})}
        messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})
        messages.append({"role": "tool", "content": task.instruction(turn + 1)})
    return [*messages, {"role": "assistant", "content": "Done."}]


FILES = Loop(
    tools=[
        {
            "type": "function",
            "function": {
                "name": WRITE,
                "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
            },
        }
    ],
    max_turns=EDITS + 1,
    max_tokens=160,
    tasks=files,
    opening=_open,
    answer=lambda task, turn, _call: task.instruction(turn + 1),
    longest=_edit,
    demonstrate=lambda task, _dice, _tool_share: _edit(task),
)

LOOPS = {"calls": CALLS, "files": FILES}
SHARES = (DemoRecipe().copying_share, DemoRecipe().tool_share)
"""Of turns that call the tool, in the two phases of a warm start."""
