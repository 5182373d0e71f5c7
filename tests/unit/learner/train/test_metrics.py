"""The figures of a step, from sums that never wait for a device."""

import math
import random

import pytest
import torch
from msgspec.structs import replace

from support.episodes import make_turns
from swarmq.learner.feed.batch_summary import rollout_s
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.methods.losses import LossInputs, TokenLoss
from swarmq.learner.train.metrics import MetricSums
from swarmq.messages import Rollout, Slot, Timings


def figures(gaps, kept=None, held=None):
    behavior_logprobs = torch.full((len(gaps),), -3.0)
    tokens = LossInputs(
        behavior_logprobs + torch.tensor(gaps),
        behavior_logprobs,
        torch.ones(len(gaps)),
        torch.zeros(len(gaps), dtype=torch.int64),
        1,
    )
    tokens = tokens._replace(held=None if held is None else torch.tensor(held))
    sums = MetricSums(torch.device("cpu"))
    kept = torch.ones(len(gaps), dtype=torch.bool) if kept is None else torch.tensor(kept)
    loss = TokenLoss(torch.zeros(len(gaps)), torch.zeros(len(gaps), dtype=torch.int64), tokens.advantages)
    sums.add_mismatch(tokens, kept)
    sums.add_tokens(tokens, torch.zeros(len(gaps)), loss, kept)
    return sums.reduce(lambda flat: flat)


@pytest.mark.parametrize("gap", [0.5, 0.01, -2.0])
def test_the_gap_of_one_token_in_a_hundred_is_known_to_a_quarter(gap):
    found = figures([0.0] * 95 + [gap] * 5)["gap_p99"]
    assert abs(gap) / 1.27 < found < abs(gap) * 1.27


def test_tokens_that_were_held_to_a_grammar_are_no_mismatch():
    """Their behavior_logprobs is normalised over what the grammar allowed, logprobs over all tokens."""
    held = figures([-5.0] * 50 + [0.1] * 50, held=[True] * 50 + [False] * 50)
    assert held["gap_p99"] < 0.13
    assert held["kl_k3"] < 0.01 < figures([-5.0] * 50 + [0.1] * 50)["kl_k3"]
    every = figures([-5.0] * 4, held=[True] * 4)
    assert (every["kl_k3"], every["effective_samples"], every["tokens_compared"]) == (0.0, 1.0, 0)


def test_what_is_not_trained_does_not_count():
    assert figures([5.0] * 50 + [0.1] * 50, kept=[False] * 50 + [True] * 50)["gap_p99"] < 0.13


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_token_is_a_large_gap_and_no_crash(broken):
    assert figures([broken] * 2 + [0.0] * 98)["gap_p99"] == pytest.approx(1e4)


def test_a_token_that_an_engine_calls_impossible_makes_the_mismatch_large_and_finite():
    """One that is not finite would be a sign of nothing."""
    assert 1e4 < figures([1e20] + [0.0] * 99)["kl_k3"] < math.inf


def test_equal_log_probabilities_have_no_mismatch():
    found = figures([0.0] * 10)
    assert (found["kl_k3"], found["effective_samples"]) == (0.0, 1.0)
    assert found["gap_p99"] < 1e-10


def test_masked_clipped_and_filtered_are_told_apart_by_the_sign_of_the_advantage_that_the_loss_used():
    """The group's advantages, all of them 1, are not what a distillation goes by."""
    effects = torch.tensor(
        [LossEffect.MASKED, LossEffect.TRUNCATED, LossEffect.CLIPPED, 0, LossEffect.MASKED, 0, 0, 0, LossEffect.MASKED]
    )
    used = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 0.0])
    zeros, ones = torch.zeros(9), torch.ones(9)
    tokens = LossInputs(zeros, zeros, ones, torch.zeros(9, dtype=torch.int64), 1)
    loss = TokenLoss(zeros, effects, used)
    sums = MetricSums(torch.device("cpu"))
    filtered = torch.arange(9) == 7
    sums.add_tokens(tokens, zeros, loss, ~filtered)
    sums.add_filtered(loss, filtered)
    found = sums.reduce(lambda flat: flat)
    shares = [
        found[f"{what}_{sign}"] for what in ("masked", "clipped", "filtered") for sign in ("positive", "negative")
    ]
    assert shares == pytest.approx([1 / 4, 1 / 3, 2 / 4, 0, 0, 1 / 4])


def test_a_rollout_lasts_from_its_first_call_to_its_last_answer():
    turns = make_turns(random.Random(0), episode_id="e", turns=3, vocab=10, length=4, version=1)
    spans = [(100.0, 2.0), (103.0, 9.0), (104.0, 1.0)]  # the second one is a slow call beside the third
    timed = [replace(t, timings=Timings(began_at=began, total_s=s)) for t, (began, s) in zip(turns, spans, strict=True)]
    told = {
        "run": "r",
        "policy": "main",
        "slot": Slot(task_id="t"),
        "kind": "k",
        "group_id": "g",
        "group_members": 1,
        "group_size": 1,
    }
    assert rollout_s(Rollout(episode_id="e", reward=1.0, turns=tuple(timed), **told)) == pytest.approx(12.0)
