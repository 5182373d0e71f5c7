"""Schedules against those of transformers, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers.optimization import (
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from swarmq.config import SCHEDULES, SwarmJob, Train
from swarmq.errors import ConfigError
from swarmq.learner.methods.check import check_method
from swarmq.learner.methods.registry import find_method

STEPS, WARM_UP, DECAY = 40, 5, 12


def factors_of_transformers(name: str, end: float) -> list[float]:
    """The factors of steps 1 to 40, as the trainers of transformers and TRL use them."""
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if name == "linear":
        made = get_linear_schedule_with_warmup(optimizer, WARM_UP, STEPS)
    elif name == "cosine":
        made = get_cosine_with_min_lr_schedule_with_warmup(optimizer, WARM_UP, STEPS, min_lr_rate=end)
    else:
        made = get_wsd_schedule(
            optimizer, WARM_UP, DECAY, num_training_steps=STEPS, min_lr_ratio=end, decay_type="linear"
        )
    return [float(made.lr_lambdas[0](step)) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("name", "end"), [("linear", 0.0), ("cosine", 0.0), ("cosine", 0.1), ("wsd", 0.0), ("wsd", 0.1)]
)
def test_a_schedule_gives_the_factors_of_transformers(name: str, end: float) -> None:
    train = Train(schedule=name, schedule_steps=STEPS, schedule_end=end, decay_steps=DECAY, warmup_steps=WARM_UP)
    schedule = find_method("schedule", name)
    ours = [min(1.0, step / WARM_UP) * schedule(step, train) for step in range(1, STEPS + 1)]
    begin = WARM_UP - 1 if name == "wsd" else 0  # that of transformers begins its warm-up at `end`
    assert ours[begin:] == pytest.approx(factors_of_transformers(name, end)[begin:], abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_passes_the_checks_and_stays_at_its_end(name: str) -> None:
    train = Train(schedule=name, schedule_steps=STEPS, schedule_end=0.25, decay_steps=DECAY)
    schedule = find_method("schedule", name)
    assert [check for check in check_method("schedule", schedule, train) if check.flaw] == []
    assert {schedule(step, train) for step in (STEPS, STEPS + 1, 10**6)} == {1.0 if name == "constant" else 0.25}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"schedule": "cosine"}, "schedule: 'cosine' needs schedule_steps or max_steps, or it would never end"),
        ({"schedule": "wsd", "max_steps": 9}, "schedule: 'wsd' needs decay_steps"),
    ],
)
def test_a_schedule_without_an_end_is_refused(settings: dict[str, Any], says: str) -> None:
    tree = {"run": "r", "policies": {"main": {"model": "m", "train": settings}}}
    with pytest.raises(ConfigError, match=re.escape(f"policies.main.train.{says}")):
        SwarmJob.build(tree)


def remembered(step: int, _: Train) -> float:
    steps.append(step)
    return 1.0 / len(steps)


steps: list[int] = []


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (lambda step, train: 1 - step, "the factor of the learning rate at step 1 is 0, not a float of at least 0"),
        (lambda step, train: 1.5 - step, "at step 2 is -0.5, not a float"),
        (lambda step, train: 0.0, "the factor is 0 at every step"),
        (remembered, "it keeps state"),
    ],
)
def test_a_wrong_schedule_is_refused_with_the_reason(schedule: Any, says: str) -> None:
    assert says in next(check_method("schedule", schedule, Train())).flaw
