"""Optimizers: which parameters they take, their formulas, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.episodes import make_group
from swarmq.config import OPTIMIZERS, Train
from swarmq.errors import SetUpError
from swarmq.learner.checkpoint import save_load
from swarmq.learner.checkpoint.discovery import Checkpoint
from swarmq.learner.methods.check import check_method
from swarmq.learner.methods.registry import find_method
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.train.trainer import Trainer

TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-3, warmup_steps=0, optimizer="muon", token_log=False)
IDENTITY = RunIdentity(run="r", policy="main", model="m")


def flaws(optimizer: Any, train: Train | None = None) -> dict[str, str]:
    return {check.name: check.flaw for check in check_method("optimizer", optimizer, train or Train()) if check.flaw}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_built_in_optimizer_passes(name: str) -> None:
    assert flaws(find_method("optimizer", name), Train(optimizer=name)) == {}


def test_muon_moves_a_matrix_along_its_orthogonalised_momentum_by_the_size_of_adamws_steps() -> None:
    """U V^T of the gradient's singular value decomposition, times 0.2 sqrt(max(rows, columns)) (2502.16982); Newton and Schulz
    come within a third of it. Embeddings, heads and vectors take AdamW's step."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(12, 6), "up": nn.Linear(6, 24), "lm_head": nn.Linear(6, 12)})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = find_method("optimizer", "muon")(list(model.named_parameters()), Train(learning_rate=1e-2))
    for group in optimizer.param_groups:
        group.update(weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    optimizer.step()
    moved = {name: (parameter.detach() - before[name]).double() for name, parameter in model.named_parameters()}
    u, _, v = torch.linalg.svd(gradients["up.weight"], full_matrices=False)
    wanted = -1e-2 * 0.2 * 24**0.5 * (u @ v)
    assert float((moved["up.weight"] - wanted).norm() / wanted.norm()) < 1 / 3
    for name in ("embed_tokens.weight", "lm_head.weight", "up.bias", "lm_head.bias"):
        torch.testing.assert_close(moved[name], -1e-2 * gradients[name].sign(), rtol=1e-3, atol=1e-6)


def batch(version: int) -> BatchRecord:
    episodes = tuple(make_group("a", (0.0, 1.0), turns=2))
    return BatchRecord(index=BatchIndex(record=version, version=version), episodes=episodes, settings=TRAIN)


def test_a_checkpoint_continues_muon_exactly_and_refuses_another_optimizer(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.step(batch(1))
    save_load.save_checkpoint(tmp_path, trainer, IDENTITY, model=str(tiny_qwen), keep=1)
    trainer.step(batch(2))
    found = Checkpoint(path=tmp_path / "step-00000001", version=1)
    again = Trainer(str(found.path), TRAIN, initial=str(tiny_qwen))
    save_load.restore(again, found)
    again.step(batch(2))
    assert all(torch.equal(a, b) for a, b in zip(trainer.lm.parameters(), again.lm.parameters(), strict=True))
    other = Trainer(str(found.path), Train(), initial=str(tiny_qwen))
    with pytest.raises(
        SetUpError, match="train.optimizer is 'adamw', but the checkpoint .*step-00000001 continues 'muon'"
    ):
        save_load.restore(other, found)


class Forgetful(torch.optim.Optimizer):
    """Momentum that is not in its state."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.momenta: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.momenta[p] = 0.9 * self.momenta.get(p, torch.zeros_like(p)) + p.grad
                p.add_(self.momenta[p], alpha=-group["lr"])


class Stubborn(torch.optim.SGD):
    """Takes no notice of the learning rate that is set."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 1e-3
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "check", "says"),
    [
        (lambda named, train: [p for _, p in named], "shape", "not a torch.optim.Optimizer"),
        (lambda named, train: torch.optim.SGD([p for _, p in named[1:]], lr=1.0), "shape", "embed_tokens.weight is in 0 parameter groups"),
        (lambda named, train: Forgetful([p for _, p in named]), "continues from its state", "something that it remembers is not in it"),
        (lambda named, train: Stubborn([p for _, p in named], lr=1.0), "learning rate", "it moves parameters at a learning rate of 0"),
    ],
)  # fmt: skip
def test_a_wrong_optimizer_is_told_what_is(optimizer: Any, check: str, says: str) -> None:
    assert says in flaws(optimizer).get(check, "passed")
