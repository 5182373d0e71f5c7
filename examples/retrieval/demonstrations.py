"""Chats that teach the toy model four ways to answer: by a precise search, by a search for half of the name, by a search for the
wrong fact, or without a search."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from examples.retrieval import environment
from examples.retrieval.agent import opening
from examples.retrieval.environment import CITIES, JOBS, Corpus, Person

TOOLS = environment.TOOLS

WAYS = ("precise", "first name", "other fact", "guess")
CORPORA = 8
"""Number of corpora, in each of which every person has other facts."""


def demonstrations(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    return _chats(dice, (0.25, 0.2, 0.2, 0.35))


def copying(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the chats of the first steps, which mostly copy names into searches and results into answers."""
    return _chats(dice, (0.7, 0.1, 0.15, 0.05))


def _chats(dice: random.Random, weights: tuple[float, ...]) -> Iterator[list[dict[str, Any]]]:
    corpora = [environment.build_corpus("toy", dice.randrange(10**9, 2 * 10**9)) for _ in range(CORPORA)]
    people = {texts: list(texts.people.values()) for texts in corpora}
    while True:
        texts = dice.choice(corpora)
        yield chat(texts, dice.choice(people[texts]), dice.choices(WAYS, weights)[0], dice)


def chat(texts: Corpus, person: Person, way: str, dice: random.Random) -> list[dict[str, Any]]:
    """Return a chat about a person. The answer is what the search found, if that is of the right kind; otherwise a guess."""
    about_city = dice.random() < 0.5
    question = f"Where does {person.name} live?" if about_city else f"What is the job of {person.name}?"
    messages = opening("toy", question)
    answer = dice.choice(CITIES if about_city else JOBS)
    if way != "guess":
        name = person.name.split()[0] if way == "first name" else person.name
        word = "lives" if about_city != (way == "other fact") else "is a"
        found = texts.search(f"{name} {word}")
        last = found.strip(".").split()[-1]
        answer = last if last in (CITIES if about_city else JOBS) else answer
        function = {"name": "search", "arguments": json.dumps({"query": f"{name} {word}"})}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": found},
        ]
    return [*messages, {"role": "assistant", "content": f"<answer>{answer}</answer>"}]
