"""A walker over frozen lakes that is a table of logits, trained with swarmq's own losses: studies of a method in seconds, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import torch
from examples.frozen_lake.environment import MOVES, Lake, tasks

from swarmq.config import Loss
from swarmq.learner.methods.advantages import leave_one_out
from swarmq.learner.methods.losses import LossInputs
from swarmq.learner.methods.losses.ppo_clip import ppo_clip
from swarmq.learner.methods.losses.reinforce import reinforce
from swarmq.learner.methods.losses.tis_mask import tis_mask
from swarmq.studies.trial import Attempt, TrialOutcome

LOSSES = {"tis_mask": tis_mask, "reinforce": reinforce, "ppo_clip": ppo_clip}
STATES = 4096
"""Rows of the table; what the player sees is hashed into it in the order in which it is met."""
WALKS = 8
"""Walks on each held-out lake."""
Walk = tuple[list[tuple[int, int, float]], float]
"""(row, move, log-probability) of each move, and the reward."""


class Walker:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.logits = torch.zeros(STATES, len(MOVES), requires_grad=True)
        self.rows: dict[str, int] = {}

    def walk(self, task: dict[str, Any], table: list[list[float]], *, shaping: float) -> Walk:
        """Walk by the log-probabilities of `table`."""
        lake, moves, taken = Lake(task), list(MOVES), []
        first = _way(lake.at, task)
        while not lake.over:
            row = self.rows.setdefault(lake.describe(), len(self.rows))
            (move,) = self.chance.choices(range(len(moves)), [2.718281828**one for one in table[row]])
            taken.append((row, move, table[row][move]))
            lake.step(moves[move])
        near = max(first - _way(lake.at, task), 0) / first
        return taken, 1.0 if lake.over == "goal" else shaping * near

    def table(self) -> list[list[float]]:
        return torch.log_softmax(self.logits.detach(), dim=-1).tolist()


def trial(attempt: Attempt) -> TrialOutcome:
    """Train with the settings of an arm, and measure the share of walks that reach the goal on held-out lakes."""
    torch.set_num_threads(1)
    chosen = {
        "loss": "tis_mask",
        "staleness": 0,
        "group_size": 8,
        "groups": 8,
        "shaping": 0.0,
        "rate": 0.1,
    } | attempt.settings
    walker, lakes = Walker(attempt.seed), list(tasks("train", 400))
    optimizer = torch.optim.Adam([walker.logits], lr=chosen["rate"])
    past, rewards = [walker.table()], list[float]()
    for _ in range(chosen["steps"]):
        old = past[max(len(past) - 1 - chosen["staleness"], 0)]
        walks: list[tuple[Walk, float]] = []
        for task in walker.chance.sample(lakes, chosen["groups"]):
            group = [walker.walk(task, old, shaping=chosen["shaping"]) for _ in range(chosen["group_size"])]
            better = leave_one_out({str(number): {"": reward} for number, (_, reward) in enumerate(group)})
            walks += zip(group, (one[""] for one in better.values()), strict=True)
        rewards.append(fmean(reward for (_, reward), _ in walks))
        optimizer.zero_grad()
        _loss(walker, walks, chosen["loss"]).backward()
        optimizer.step()
        past.append(walker.table())
    walker.chance = random.Random(10_000 + attempt.seed)
    scores = {
        task["id"]: fmean(walker.walk(task, past[-1], shaping=0.0)[1] for _ in range(WALKS))
        for task in tasks("held_out", 96)
    }
    return TrialOutcome(
        metrics={"held_out_success": fmean(scores.values())}, curves={"reward": tuple(rewards)}, scores=scores
    )


def _loss(walker: Walker, walks: Iterable[tuple[Walk, float]], name: str) -> torch.Tensor:
    moves = [(row, move, logprob, advantage) for (taken, _), advantage in walks for row, move, logprob in taken]
    rows, chosen = torch.tensor([one[0] for one in moves]), torch.tensor([one[1] for one in moves])
    inputs = LossInputs(
        logprobs=torch.log_softmax(walker.logits, dim=-1)[rows, chosen],
        behavior_logprobs=torch.tensor([one[2] for one in moves]),
        advantages=torch.tensor([one[3] for one in moves]),
        calls=torch.arange(len(moves)),
        num_calls=len(moves),
    )
    return LOSSES[name](inputs, Loss()).per_token.mean()


def _way(at: tuple[int, int], task: dict[str, Any]) -> int:
    """Return the number of moves to the goal, were there no holes."""
    return abs(at[0] - task["goal"][0]) + abs(at[1] - task["goal"][1])
