"""The figures of a step, from sums that never wait for a device."""

import math

import pytest
import torch

from swarmq.learner.algorithms.losses import Tokens
from swarmq.learner.metrics import Sums


def figures(gaps, kept=None):
    mu = torch.full((len(gaps),), -3.0)
    tokens = Tokens(mu + torch.tensor(gaps), mu, torch.ones(len(gaps)), torch.zeros(len(gaps), dtype=torch.int64), 1)
    sums = Sums(torch.device("cpu"))
    kept = torch.ones(len(gaps), dtype=torch.bool) if kept is None else torch.tensor(kept)
    sums.add_tokens(tokens, torch.zeros(len(gaps)), torch.zeros(len(gaps), dtype=torch.bool), kept)
    return sums.reduced(lambda flat: flat)


@pytest.mark.parametrize("gap", [0.5, 0.01, -2.0])
def test_the_gap_of_one_token_in_a_hundred_is_known_to_a_quarter(gap):
    found = figures([0.0] * 95 + [gap] * 5)["gap_p99"]
    assert abs(gap) / 1.27 < found < abs(gap) * 1.27


def test_what_is_not_trained_does_not_count():
    assert figures([5.0] * 50 + [0.1] * 50, kept=[False] * 50 + [True] * 50)["gap_p99"] < 0.13


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_token_is_a_large_gap_and_no_crash(broken):
    assert figures([broken] * 2 + [0.0] * 98)["gap_p99"] == pytest.approx(1e4)


def test_equal_log_probabilities_have_no_mismatch():
    found = figures([0.0] * 10)
    assert (found["kl_k3"], found["effective_samples"]) == (0.0, 1.0)
    assert found["gap_p99"] < 1e-10
