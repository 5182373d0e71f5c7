"""Every loss and its gradient against a plain float64 implementation written from the formula, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from swarmq.config import Loss, Train
from swarmq.learner.algorithms.filters import keep
from swarmq.learner.algorithms.losses import LOSSES, Tokens

CALLS = [0, 0, 0, 1, 1, 2]
Reference = Callable[[float, float, float, float], tuple[float, float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def tis_mask(theta: float, mu: float, a: float, _: float) -> tuple[float, float]:
    moved = math.exp(theta) - math.exp(mu)
    masked = (a > 0 and moved > 0.2) or (a < 0 and moved < -0.2)
    weight = 0.0 if masked else min(math.exp(theta - mu), 20.0)
    return -weight * a * theta + 1e-3 * (theta - mu) ** 2, -weight * a + 2e-3 * (theta - mu)


def ppo_clip(theta: float, mu: float, a: float, _: float) -> tuple[float, float]:
    rho = math.exp(theta - mu)
    inner, bound = min(rho * a, clip(rho, 0.8, 1.28) * a), 3.0 * a
    value = max(inner, bound) if a < 0 else inner
    return -value, -rho * a if value == rho * a else 0.0


def cispo(theta: float, mu: float, a: float, _: float) -> tuple[float, float]:
    weight = clip(math.exp(theta - mu), 0.0, 5.0)
    return -weight * a * theta, -weight * a


def gspo(theta: float, mu: float, a: float, sequence: float) -> tuple[float, float]:
    limited = clip(sequence, 1 - 3e-4, 1 + 4e-4)
    value = min(sequence * a, limited * a)
    return -value, -sequence * a if value == sequence * a else 0.0


def reinforce(theta: float, mu: float, a: float, _: float) -> tuple[float, float]:
    weight = min(math.exp(theta - mu), 20.0)
    return -weight * a * theta, -weight * a


def sft(theta: float, mu: float, a: float, _: float) -> tuple[float, float]:
    return -theta, -1.0


REFERENCES: dict[str, Reference] = {
    "tis_mask": tis_mask, "ppo_clip": ppo_clip, "cispo": cispo, "gspo": gspo, "reinforce": reinforce, "sft": sft,
}  # fmt: skip


def test_every_loss_has_a_reference() -> None:
    assert REFERENCES.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("spread", [1e-4, 0.3, 4.0])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_follow_the_formula(name: str, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mu = -3 * torch.rand(6, generator=generator, dtype=torch.float64)
    theta = (mu + spread * torch.randn(6, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    a = torch.randn(6, generator=generator, dtype=torch.float64)
    values, slopes = [], []
    for i, row in enumerate(CALLS):
        members = [j for j, other in enumerate(CALLS) if other == row]
        sequence = math.exp(sum(float(theta[j] - mu[j]) for j in members) / len(members))
        value, slope = REFERENCES[name](float(theta[i]), float(mu[i]), float(a[i]), sequence)
        values.append(value)
        slopes.append(slope)
    learned = theta.float().requires_grad_()
    tokens = Tokens(learned, mu.float(), a.float(), torch.tensor(CALLS), 3)
    loss = LOSSES[name](tokens, Loss(name="tis_mask")).per_token
    loss.sum().backward()
    torch.testing.assert_close(loss.double(), torch.tensor(values, dtype=torch.float64), rtol=2e-4, atol=2e-5)
    assert learned.grad is not None
    torch.testing.assert_close(learned.grad.double(), torch.tensor(slopes, dtype=torch.float64), rtol=2e-4, atol=2e-5)


def test_clipped_tokens_are_those_whose_gradient_was_cut() -> None:
    theta = torch.tensor([-0.1, -2.0, -0.1, -2.0], requires_grad=True)
    mu = torch.tensor([-2.0, -0.1, -2.0, -0.1])
    tokens = Tokens(theta, mu, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4, dtype=torch.int64), 1)
    for name in ("ppo_clip", "tis_mask"):
        result = LOSSES[name](tokens, Loss(pull=0.0))
        (grad,) = torch.autograd.grad(result.per_token.sum(), theta)
        assert (grad == 0).tolist() == result.clipped.tolist(), name


def test_calls_are_left_out_by_their_mean_mismatch_and_not_for_being_long() -> None:
    gap = torch.tensor([0.1] * 500 + [3.0, 3.0])
    calls = torch.tensor([0] * 500 + [1, 1])
    kept = keep(Tokens(gap - 3, torch.full((502,), -3.0), gap, calls, 2), Train(row_k3_max=1.0))
    assert kept is not None
    assert kept.tokens.tolist() == [True] * 500 + [False] * 2
    assert (int(kept.calls_out), int(kept.tokens_out)) == (1, 0)


def test_tokens_outside_the_band_are_left_out_and_counted() -> None:
    ratios = torch.tensor([0.49, 0.51, 1.0, 1.99, 2.01])
    kept = keep(
        Tokens(ratios.log() - 3, torch.full((5,), -3.0), ratios, torch.zeros(5, dtype=torch.int64), 1),
        Train(ratio_band=(0.5, 2.0)),
    )
    assert kept is not None
    assert kept.tokens.tolist() == [False, True, True, True, False]
    assert (int(kept.calls_out), int(kept.tokens_out)) == (0, 2)


def test_without_filters_nothing_is_computed() -> None:
    assert keep(Tokens(*(torch.zeros(1),) * 3, torch.zeros(1, dtype=torch.int64), 1), Train()) is None
