"""Questions about the files of a folder, and chores in it, for an agent with a shell.

Each task has a seed from which `build` makes the files; so a task is a few bytes on the queue, and the answer stays out of it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec

HELD_OUT_SEED, TRAIN_SEED, WARMUP_SEED = 0, 1_000_000_000, 2_000_000_000
"""First seeds of the splits. Demonstrations use seeds from WARMUP_SEED on."""
HELD_OUT = 96
TRAINED = {"toy": 1500, "full": 20_000}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

NAMES = ("bay", "cove", "dune", "fjord", "glen", "hill", "isle", "lake", "marsh", "pond", "reef", "tarn")
WORDS = ("apple", "beech", "cedar", "daisy", "elder", "fern", "grape", "hazel", "iris", "kiwi", "lemon", "mango")
SERVICES = ("billing", "gateway", "mailer", "search", "users", "worker")
LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "WARNING", "ERROR")
MESSAGES = ("cache refreshed", "connection closed", "request took 840 ms", "retrying", "user not found", "disk is full")
GOALS = {"toy": ("find", "count", "delete"), "full": ("errors", "noisiest", "purge", "report")}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a shell command in your folder and return its output.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's files by relative path, what is asked, and what is right."""

    files: dict[str, str]
    question: str
    answer: str | None
    """Text to answer; None where only the files count."""
    after: dict[str, str]
    """Files as they must be at the end."""
    subject: str
    """Word or file that the question names; demonstrations use it."""


def train() -> Iterator[dict[str, Any]]:
    """Yield the training tasks of the toy size."""
    return _tasks("train", "toy", TRAIN_SEED, TRAINED["toy"])


def held_out() -> Iterator[dict[str, Any]]:
    """Yield the held-out tasks of the toy size."""
    return _tasks("held-out", "toy", HELD_OUT_SEED, HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    """Yield training tasks with dozens of log files in folders, for a real shell."""
    return _tasks("train", "full", TRAIN_SEED, TRAINED["full"])


def held_out_full() -> Iterator[dict[str, Any]]:
    return _tasks("held-out", "full", HELD_OUT_SEED, HELD_OUT)


def build(task: dict[str, Any]) -> Problem:
    """Return the problem of a task; the same task gives the same problem."""
    dice = random.Random(task["seed"])
    return _build_toy(task["goal"], dice) if task["size"] == "toy" else _build_full(task["goal"], dice)


def score(problem: Problem, files: dict[str, str], reply: str) -> float:
    """Return 1 if the answer is right and the files are as they must be; a wrong answer or any other change gives 0."""
    if files != problem.after:
        return 0.0
    answers = ANSWER.findall(reply)
    if problem.answer is None:
        return 1.0
    return 1.0 if answers and answers[-1].strip() == problem.answer else 0.0


def _tasks(split: str, size: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        goal = GOALS[size][number % len(GOALS[size])]
        yield {"id": f"{split}-{size}-{number}", "size": size, "goal": goal, "seed": first + number}


def _build_toy(goal: str, dice: random.Random) -> Problem:
    names = [f"{name}.txt" for name in dice.sample(NAMES, 4)]
    words = dice.sample(WORDS, 12)
    lengths = [dice.randint(1, 6) for _ in names]
    files = {}
    for at, (name, length) in enumerate(zip(names, lengths, strict=True)):
        own = words[3 * at : 3 * at + 3]
        lines = [own[0], *(dice.choice(own) for _ in range(length - 1))]
        files[name] = "".join(f"{line}\n" for line in dice.sample(lines, length))
    chosen = dice.randrange(4)
    name, word = names[chosen], words[3 * chosen]
    if goal == "count":
        return Problem(
            files=files,
            after=files,
            question=f"How many lines does {name} have?",
            answer=str(lengths[chosen]),
            subject=name,
        )
    if goal == "find":
        return Problem(files=files, after=files, question=f"Which file has {word}?", answer=name, subject=word)
    rest = {other: text for other, text in files.items() if other != name}
    return Problem(files=files, after=rest, question=f"Delete the file with {word}.", answer=None, subject=word)


def _build_full(goal: str, dice: random.Random) -> Problem:
    """Return a folder of logs by service and day, with a question that takes several commands."""
    files, errors = {}, dict.fromkeys(SERVICES, 0)
    for service in SERVICES:
        for day in range(1, dice.randint(5, 9)):
            lines = [
                f"{hour:02}:{dice.randrange(60):02} {dice.choice(LEVELS)} {dice.choice(MESSAGES)}"
                for hour in sorted(dice.randrange(24) for _ in range(dice.randint(3, 40)))
            ]
            errors[service] += sum(" ERROR " in line for line in lines)
            files[f"logs/{service}/2031-04-{day:02}.log"] = "".join(f"{line}\n" for line in lines)
    service = dice.choice(SERVICES)
    if goal == "errors":
        question = f"How many lines in the logs of {service} have the level ERROR?"
        return Problem(files=files, after=files, question=question, answer=str(errors[service]), subject=service)
    if goal == "noisiest":
        question = "Which log file has most lines? If several have as many, take the first by path. Answer with its path from logs/ on."
        longest = min(files, key=lambda path: (-files[path].count("\n"), path))
        return Problem(files=files, after=files, question=question, answer=longest, subject=service)
    if goal == "purge":
        quiet = next(path for path in files if f"/{service}/" in path)  # at least one file has to go
        files[quiet] = files[quiet].replace(" ERROR ", " INFO ")
        kept = {path: text for path, text in files.items() if " ERROR " in text or f"/{service}/" not in path}
        question = f"Delete those log files of {service} that have no line with the level ERROR. Change nothing else."
        return Problem(files=files, after=kept, question=question, answer=None, subject=service)
    report = "".join(f"{name} {errors[name]}\n" for name in sorted(SERVICES))
    question = (
        "Write report.txt with a line for each service, in alphabetical order: its name, a space, and the number of lines "
        "with the level ERROR in all its logs. Change nothing else."
    )
    return Problem(files=files, after=files | {"report.txt": report}, question=question, answer=None, subject=service)
