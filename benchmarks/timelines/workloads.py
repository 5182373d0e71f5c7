"""Synthetic episodes of the shapes that agents make, token by token random, for measurements of timelines.

Sizes are in units: a turn samples one unit and then reads one unit (a tool's answer, a user's message); a prompt
has four. With the default unit of 128 tokens that is a chat with 512 tokens of instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from swarmq.timeline import PrefixTree, ResolvedTurn, make_resolved_turn

Episode = list[ResolvedTurn]
COMPACTED_EVERY = 8


class Workload(NamedTuple):
    name: str
    make: Callable[[Source], list[Episode]]
    """One group of episodes; measurements repeat it with other random tokens until there is enough to do."""
    goal: float | None = None
    """Speed-up over the oracle to be reached on an H200."""
    groups: int = 1
    """At least so many: a pass of several trees keeps a GPU busy to its end, where the last blocks of one tree do not."""


class Source:
    """Random tokens, never the same twice."""

    def __init__(self, unit: int, vocab: int, seed: int = 0) -> None:
        self.unit = unit
        self._vocab = vocab
        self._random = np.random.default_rng(seed)

    def tokens(self, units: float) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocab, round(units * self.unit))]

    def sample(self, history: list[int], units: float = 1) -> ResolvedTurn:
        sampled = self.tokens(units)
        return make_resolved_turn(history, sampled, np.full(len(sampled), -1.0, np.float32))


def chat(source: Source, history: list[int], turns: int) -> Episode:
    """A chat that only grows."""
    made = []
    for _ in range(turns):
        made.append(source.sample(history))
        history = [*made[-1].token_ids.tolist(), *source.tokens(1)]
    return made


def linear(turns: int) -> Callable[[Source], list[Episode]]:
    return lambda source: [chat(source, source.tokens(4), turns)]


def common_prompt(units: int, *, members: int = 4, turns: int = 4) -> Callable[[Source], list[Episode]]:
    """A group that shares a system prompt of so many units, and nothing else: every member's task is its own."""

    def make(source: Source) -> list[Episode]:
        prompt = source.tokens(units)
        return [chat(source, [*prompt, *source.tokens(4)], turns) for _ in range(members)]

    return make


def forks(branches: int, *, members: int = 4, trunk: int = 8, turns: int = 3) -> Callable[[Source], list[Episode]]:
    """Agents that work alone for a while and then hand the whole conversation to several sub-agents."""

    def make(source: Source) -> list[Episode]:
        prompt = source.tokens(8)
        episodes = []
        for _ in range(members):
            alone = chat(source, prompt, trunk)
            said = alone[-1].token_ids.tolist()
            parts = [chat(source, [*said, *source.tokens(1)], turns) for _ in range(branches)]
            episodes.append([*alone, *(turn for part in parts for turn in part)])
        return episodes

    return make


def think_stripped(turns: int) -> Callable[[Source], list[Episode]]:
    """A template that removes the thinking of earlier turns: no prompt extends what was sampled."""

    def make(source: Source) -> list[Episode]:
        history, made = source.tokens(4), []
        for _ in range(turns):
            made.append(source.sample(history))
            answer = made[-1].sampled_ids[-source.unit // 4 :].tolist()
            history = [*history, *answer, *source.tokens(1)]
        return [made]

    return make


def compacted(turns: int) -> Callable[[Source], list[Episode]]:
    """Every few turns the history is replaced by a summary of one unit."""

    def make(source: Source) -> list[Episode]:
        prompt, made = source.tokens(4), []
        for _ in range(0, turns, COMPACTED_EVERY):
            made += chat(source, [*prompt, *source.tokens(1)], COMPACTED_EVERY)
        return [made]

    return make


WORKLOADS = [
    Workload("linear_10", linear(10), 5.5),
    Workload("linear_20", linear(20), 9.0),
    Workload("linear_30", linear(30), 13.0),
    Workload("forks_3", forks(3), 8.0, groups=2),
    Workload("linear_2", linear(2)),
    Workload("linear_5", linear(5)),
    Workload("think_stripped_10", think_stripped(10)),
    Workload("compacted_24", compacted(24)),
    Workload("prompt_0", common_prompt(0)),
    Workload("prompt_1k", common_prompt(8)),
    Workload("prompt_4k", common_prompt(32)),
    Workload("prompt_8k", common_prompt(64)),
    Workload("forks_2", forks(2)),
    Workload("forks_4", forks(4)),
]


def batch(workload: Workload, source: Source, at_least: int, tree_at_least: int = 0) -> list[Episode]:
    """Groups until there are as many as the workload wants, and the oracle has `at_least` tokens to compute and the tree
    `tree_at_least`: fewer than keep a processor busy would measure how fast work is handed to it."""
    episodes: list[Episode] = []
    unfolded = folded = groups = 0
    while groups < workload.groups or unfolded < at_least or folded < tree_at_least:
        groups += 1
        group = workload.make(source)
        unfolded += sum(len(turn) for turns in group for turn in turns)
        folded += PrefixTree(group).num_tokens
        episodes += group
    return episodes
