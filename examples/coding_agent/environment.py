"""Small broken folders for the toy model: a file with a function that does not do what it says, and a test. Pure and seeded but for
the folders, which are written when a split is read.

    main.py   a docstring that says what the function returns, and a last line that returns something else
    test.py   fails until the last line is right
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from examples.coding_agent.editor import FILE

FOLDERS = Path("runs/toy/coding_agent_folders")
"""Where the folders are written, from the repository's root; `--folder` of `swarmq run`."""
HELD_OUT, TRAINED = 96, 1500
MEANINGS = {
    "a + b": ("Return a plus b.", "Return the sum.", "Add b to a."),
    "a - b": ("Return a minus b.", "Return the difference.", "Take b from a."),
    "a * b": ("Return a times b.", "Return the product.", "Multiply a by b."),
    "a // b": ("Return the quotient.", "Return how often b fits in a.", "Divide a by b."),
    "a % b": ("Return the remainder.", "Return a modulo b.", "Return what b leaves of a."),
    "a ** b": ("Return the power.", "Raise a to b.", "Return a to the power of b."),
    "max(a, b)": ("Return the larger one.", "Return the maximum.", "Return the most."),
    "min(a, b)": ("Return the smaller one.", "Return the minimum.", "Return the least."),
}
"""Expression -> docstrings of functions that should return it."""
CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
PAIRS = ((7, 3), (2, 5), (9, 4))
"""Arguments of the tests; no two of the expressions agree on all of them."""


def train() -> Iterator[dict[str, Any]]:
    return tasks("train", TRAINED)


def held_out() -> Iterator[dict[str, Any]]:
    return tasks("held_out", HELD_OUT)


def tasks(split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first tasks of a split, and write their folders."""
    for number, problem in enumerate(islice(problems(random.Random(split), split), count)):
        folder = FOLDERS / f"{split}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in problem.files().items():
            (folder / name).write_text(text)
        yield {"id": folder.name, "folder": folder.name, "prompt": problem.prompt}


class Problem(NamedTuple):
    """A function that should return the expression `right`, says so as `meaning`, and returns `wrong`."""

    name: str
    meaning: str
    right: str
    wrong: str

    @property
    def prompt(self) -> str:
        return f"The test of {self.name} fails."

    @property
    def source(self) -> str:
        return f'def {self.name}(a, b):\n    """{self.meaning}"""\n    return {self.wrong}\n'

    def files(self) -> dict[str, str]:
        """Return file name -> text."""
        checks = [f"assert {self.name}({a}, {b}) == {evaluate(self.right, a, b)}" for a, b in PAIRS]
        return {
            FILE: self.source,
            "test.py": "\n".join([f"from main import {self.name}", "", *checks, ""]),
        }


def problems(dice: random.Random, split: str) -> Iterator[Problem]:
    """Yield problems endlessly. Names of held-out functions end with a vowel, all others with a consonant."""
    while True:
        name = "".join(dice.choice(letters) for letters in (CONSONANTS, VOWELS) * 2)
        name += "" if split == "held_out" else dice.choice(CONSONANTS)
        right, wrong = dice.sample(list(MEANINGS), 2)
        yield Problem(name, dice.choice(MEANINGS[right]), right, wrong)


def evaluate(expression: str, a: int, b: int) -> int:
    """Return the value of an expression of MEANINGS."""
    return int(eval(expression, {"a": a, "b": b}))
