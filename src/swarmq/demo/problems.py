"""The demo's problems: arithmetic from `reasoning-gym`, generated and scored by its own code.

There are two kinds. A problem is identified by split, kind and number. Training, held-out and warm-up problems come from
disjoint ranges of generator seeds, and held-out questions are also excluded from the other splits by their text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import msgspec
import reasoning_gym
from reasoning_gym.utils import extract_answer

Split = Literal["warmup", "train", "held-out"]

FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "sum": ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 2}),
    "product": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
}
KINDS = tuple(FAMILIES)

SPLIT_SEEDS: dict[Split, int] = {"held-out": 0, "train": 1_000_000_000, "warmup": 2_000_000_000}
SPLIT_SIZE = 100_000_000
HELD_OUT_PER_KIND = 1000
"""Number of held-out problems of a kind; their questions never appear in another split."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One question, sent as the payload of a task."""

    task_id: str
    kind: str
    number: int
    split: Split
    question: str


def problems(kind: str, split: Split, count: int, *, start: int = 0) -> Iterator[Problem]:
    """Yield `count` problems of a kind from number `start` on; train and warm-up problems exclude held-out questions."""
    number = start
    while count:
        entry = _entry(kind, split, number)
        if split == "held-out" or entry["question"] not in _held_out_questions(kind):
            yield Problem(
                task_id=f"{split}-{kind}-{number}", kind=kind, number=number, split=split, question=entry["question"]
            )
            count -= 1
        number += 1


def score(problem: Problem, reply: str) -> float:
    """Return the reward, between 0 and 1, by the kind's own verifier; text outside <answer> tags is no answer."""
    entry = _entry(problem.kind, problem.split, problem.number)
    return float(_dataset(problem.kind, problem.split).score_answer(extract_answer(reply), entry))


def solution(problem: Problem) -> tuple[str, str]:
    """Return expression and true answer, for demonstrations only."""
    entry = _entry(problem.kind, problem.split, problem.number)
    return entry["metadata"]["expression"], entry["answer"]


@cache
def _dataset(kind: str, split: Split) -> Any:
    family, settings = FAMILIES[kind]
    return reasoning_gym.create_dataset(family, seed=SPLIT_SEEDS[split], size=SPLIT_SIZE, **settings)


def _entry(kind: str, split: Split, number: int) -> dict[str, Any]:
    return dict(_dataset(kind, split)[number])


@cache
def _held_out_questions(kind: str) -> frozenset[str]:
    return frozenset(_entry(kind, "held-out", number)["question"] for number in range(HELD_OUT_PER_KIND))
