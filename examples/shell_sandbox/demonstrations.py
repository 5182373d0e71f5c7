"""Chats that teach the toy model the commands and three ways to work: look for what is asked, list and guess, or guess at once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from examples.shell_sandbox import environment, shell
from examples.shell_sandbox.agent import opening
from examples.shell_sandbox.environment import Problem

TOOLS = environment.TOOLS


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    while True:
        yield chat(dice, dice.choices(("look", "list", "guess"), (0.25, 0.35, 0.4))[0])


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the chats of the first steps, which mostly copy words into commands and output into answers."""
    while True:
        yield chat(dice, dice.choices(("look", "list", "guess"), (0.8, 0.15, 0.05))[0])


def chat(dice: random.Random, way: str) -> list[dict[str, Any]]:
    goal = dice.choice(environment.GOALS["toy"])
    problem = environment.build({"size": "toy", "goal": goal, "seed": environment.WARMUP_SEED + dice.randrange(10**9)})
    return Demonstrator(problem, goal, dice).show(way)


class Demonstrator:
    """Writer of one chat, whose commands are run as they are written."""

    def __init__(self, problem: Problem, goal: str, dice: random.Random) -> None:
        self.problem, self.goal, self.dice = problem, goal, dice
        self.files = dict(problem.files)
        self.messages = opening("toy", problem.question)

    def show(self, way: str) -> list[dict[str, Any]]:
        guess = f"{self.dice.choice(environment.NAMES)}.txt"
        if way == "look" and self.goal == "count":
            guess = self.run(f"wc -l {self.problem.subject}").split()[0]
        elif way == "look":
            guess = self.run(f"grep -l {self.problem.subject} *")
        elif way == "list":
            guess = self.dice.choice(self.run("ls").split())
        if self.goal == "count" and way != "look":
            guess = str(self.dice.randint(1, 6))
        if self.goal == "delete":
            self.run(f"rm {guess}")
            guess = "done"
        return [*self.messages, {"role": "assistant", "content": f"<answer>{guess}</answer>"}]

    def run(self, command: str) -> str:
        """Add a call of the tool and its output to the chat, and return the output."""
        call_id = f"c{len(self.messages)}"
        function = {"name": "run", "arguments": json.dumps({"command": command})}
        call = {"id": call_id, "type": "function", "function": function}
        output = shell.run("toy", self.files, command)
        self.messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": output},
        ]
        return output
