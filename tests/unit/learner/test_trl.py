"""Our losses give TRL's numbers, which scripts/trl_golden.py wrote down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swarmq.config import Loss
from swarmq.learner.algorithms.losses import Tokens, policy_loss
from swarmq.learner.algorithms.normalisation import token_weight, units

GOLDEN = json.loads(Path(__file__).with_name("trl_golden.json").read_text())
GIVEN = GOLDEN["given"]


@pytest.mark.parametrize("case", GOLDEN["computed"])
def test_loss_and_gradient_are_trls(case: str) -> None:
    name, normalisation, *kl = case.split(", ")
    lengths = GIVEN["lengths"]
    calls = torch.tensor([call for call, length in enumerate(lengths) for _ in range(length)])
    theta, mu, reference = (torch.tensor(GIVEN[key], dtype=torch.float64) for key in ("theta", "mu", "reference"))
    if kl:
        mu = theta.clone()
    theta.requires_grad_()
    advantages = torch.tensor(GIVEN["advantages"], dtype=torch.float64)[calls]
    tokens = Tokens(theta, mu, advantages, calls, len(lengths), reference=reference if kl else None)
    weights = torch.tensor(
        [
            token_weight(normalisation, episode_tokens=length, constant_length=GIVEN["constant_length"])
            for length in lengths
        ],
        dtype=torch.float64,
    )[calls]
    count = sum(lengths) if units(normalisation) == "tokens" else len(lengths)
    loss = (policy_loss(tokens, Loss(name=name, kl=0.1 if kl else 0.0)).per_token * weights).sum() / count
    loss.backward()
    wanted = GOLDEN["computed"][case]
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-6)
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx(wanted["gradient"], rel=1e-5, abs=1e-9)
