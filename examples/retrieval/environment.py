"""A corpus of facts about invented people in SQLite FTS5, and questions about them.

Everything follows from the seed of the corpus. The people of held-out questions are in the corpus, but no training question is
about them; demonstrations search a corpus of other facts.
"""

from __future__ import annotations

import random
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec

CORPUS_SEED = {"toy": 1, "full": 2}
HELD_OUT_PEOPLE = 64
TRAINED = {"toy": 1500, "full": 20_000}
MAX_QUERY = 200
RESULTS = {"toy": 1, "full": 5}
"""Number of texts that a search returns."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

FIRST = (
    *(
        "Ada",
        "Ben",
        "Cleo",
        "Dan",
        "Eva",
        "Finn",
        "Gus",
        "Hana",
        "Ida",
        "Jon",
        "Kim",
        "Leo",
        "Mia",
        "Ned",
        "Ola",
        "Pia",
    ),
    *("Quin", "Rosa", "Sam", "Tess", "Ugo", "Vera", "Will", "Yara"),
)
LAST = (
    *("Adler", "Brook", "Cole", "Drew", "Ellis", "Frost", "Grant", "Holt", "Irwin", "Jones", "Kent", "Lane", "Marsh"),
    *("Nash", "Olsen", "Price", "Quill", "Reed", "Stone", "Trent", "Usher", "Vance", "West", "York"),
)
CITIES = ("Bergen", "Cork", "Delft", "Evora", "Ghent", "Hull", "Jena", "Kiel", "Lyon", "Metz", "Nice", "Oslo", "Pisa")
JOBS = ("baker", "clerk", "diver", "farmer", "guard", "judge", "miller", "nurse", "pilot", "singer", "tailor", "vet")
MIDDLE = tuple("ABCDEFGHJKLMNPRSTW")
"""Middle initials, which the full size adds to the names."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the texts for all words of the query.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
]


class Person(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    city: str
    job: str
    manager: str
    """Name of another person."""


class Corpus:
    """People and an index of the texts about them. Threads may share it."""

    def __init__(self, people: Sequence[Person], texts: Sequence[str], *, results: int) -> None:
        self.people = {person.name: person for person in people}
        self._results = results
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE texts USING fts5(body)")
        self._index.executemany("INSERT INTO texts (body) VALUES (?)", [(text,) for text in texts])

    def search(self, query: str) -> str:
        """Return the best texts that have all words of the query. Words are quoted, so that no query is FTS5 syntax."""
        words = re.findall(r"\w+", query[:MAX_QUERY])
        if not words:
            return "give words to search for"
        with self._lock:
            rows = self._index.execute(
                "SELECT body FROM texts WHERE texts MATCH ? ORDER BY bm25(texts), rowid LIMIT ?",
                (" ".join(f'"{word}"' for word in words), self._results),
            ).fetchall()
        return "\n".join(body for (body,) in rows) or "nothing found"


def train() -> Iterator[dict[str, Any]]:
    """Yield the training tasks of the toy size: questions that one search answers."""
    return _tasks("train", "toy")


def held_out() -> Iterator[dict[str, Any]]:
    """Yield the held-out tasks of the toy size."""
    return _tasks("held-out", "toy")


def train_full() -> Iterator[dict[str, Any]]:
    """Yield training tasks that take two or three searches each, in thousands of texts."""
    return _tasks("train", "full")


def held_out_full() -> Iterator[dict[str, Any]]:
    return _tasks("held-out", "full")


def score(task: dict[str, Any], reply: str) -> float:
    """Return 1 if the last <answer> is the right word and nothing else."""
    answers = ANSWER.findall(reply)
    return 1.0 if answers and answers[-1].strip(" .\n").casefold() == task["answer"].casefold() else 0.0


@cache
def corpus(size: str) -> Corpus:
    """Return the corpus of a size, made once in a process."""
    return build_corpus(size, CORPUS_SEED[size])


def build_corpus(size: str, seed: int) -> Corpus:
    dice = random.Random(seed)
    people = _invent_people(size, dice)
    write = _write_toy_texts if size == "toy" else _write_full_texts
    texts = [text for person in people for text in write(person, dice)]
    dice.shuffle(texts)
    return Corpus(people, texts, results=RESULTS[size])


def _invent_people(size: str, dice: random.Random) -> list[Person]:
    if size == "toy":
        names = [f"{first} {last}" for first in FIRST for last in LAST]
    else:
        names = [f"{first} {middle}. {last}" for first in FIRST for middle in MIDDLE for last in LAST]
    dice.shuffle(names)
    return [
        Person(name=name, city=dice.choice(CITIES), job=dice.choice(JOBS), manager=names[at - 1])
        for at, name in enumerate(names)
    ]


def _write_toy_texts(person: Person, _dice: random.Random) -> list[str]:
    return [f"{person.name} lives in {person.city}.", f"{person.name} is a {person.job}."]


def _write_full_texts(person: Person, dice: random.Random) -> list[str]:
    """Return three texts whose wording varies, so that a query of the question's words seldom finds them."""
    homes = (
        "{name} has a flat in {city}.",
        "{name} moved to {city} years ago.",
        "You meet {name} in the streets of {city}.",
    )
    works = ("{name} earns a living as a {job}.", "{name} was trained as a {job}.", "By day, {name} is a {job}.")
    chiefs = (
        "{name} reports to {manager}.",
        "The manager of {name} is {manager}.",
        "{manager} leads the team of {name}.",
    )
    fields = msgspec.structs.asdict(person)
    return [dice.choice(wordings).format(**fields) for wordings in (homes, works, chiefs)]


def _tasks(split: str, size: str) -> Iterator[dict[str, Any]]:
    people = list(corpus(size).people.values())
    asked = people[:HELD_OUT_PEOPLE] if split == "held-out" else people[HELD_OUT_PEOPLE:]
    questions = [question for person in asked for question in _ask_about(size, person)]
    random.Random(CORPUS_SEED[size]).shuffle(questions)
    for number, (question, answer) in enumerate(questions[: TRAINED[size]]):
        yield {"id": f"{split}-{size}-{number}", "size": size, "question": question, "answer": answer}


def _ask_about(size: str, person: Person) -> list[tuple[str, str]]:
    if size == "toy":
        return [(f"Where does {person.name} live?", person.city), (f"What is the job of {person.name}?", person.job)]
    manager = corpus(size).people[person.manager]
    return [
        (f"In which city does the manager of {person.name} live?", manager.city),
        (f"What is the job of the manager of the manager of {person.name}?", corpus(size).people[manager.manager].job),
    ]
