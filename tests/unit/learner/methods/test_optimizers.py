"""Optimizers: which parameters they take, their formulas, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from support.episodes import make_group
from swarmq.config import OPTIMIZERS, Train
from swarmq.errors import SetUpError
from swarmq.learner.checkpoint import save_load
from swarmq.learner.checkpoint.discovery import Checkpoint
from swarmq.learner.checkpoint.model_files import HostCopies
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


def test_adamw_with_moments_of_eight_bits_stays_near_adamw_in_a_quarter_of_the_bytes() -> None:
    def steps(name: str) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        model = nn.Linear(128, 128)
        optimizer = find_method("optimizer", name)(list(model.named_parameters()), Train(learning_rate=1e-2))
        start = model.weight.detach().clone()
        for _ in range(20):
            model(torch.randn(64, 128)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = [value for value in optimizer.state[model.weight].values() if isinstance(value, torch.Tensor)]
        return model.weight.detach() - start, sum(value.nbytes for value in moments if value.shape == start.shape)

    (exact, exact_bytes), (quantised, bytes_) = steps("adamw"), steps("adamw_8bit")
    assert float((quantised - exact).norm() / exact.norm()) < 0.05
    assert not torch.equal(quantised, exact)
    assert exact_bytes == 4 * bytes_ == 8 * exact.numel()


def batch(version: int, train: Train = TRAIN) -> BatchRecord:
    episodes = tuple(make_group("a", (0.0, 1.0), turns=2))
    return BatchRecord(index=BatchIndex(record=version, version=version), episodes=episodes, settings=train)


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_a_checkpoint_continues_an_optimizer_exactly_and_refuses_another(
    tiny_qwen: Path, tmp_path: Path, name: str
) -> None:
    """Copied for a checkpoint that is written while the next step is taken."""
    train = msgspec.structs.replace(TRAIN, optimizer=name)
    trainer = Trainer(str(tiny_qwen), train)
    trainer.step(batch(1, train))
    save_load.reserve_copies(trainer, copies := HostCopies())()
    draft = save_load.draft_checkpoint(tmp_path, trainer, IDENTITY, model=str(tiny_qwen), copies=copies)
    assert draft
    trainer.step(batch(2, train))
    save_load.finish_checkpoint(draft, keep=1)
    found = Checkpoint(path=tmp_path / "step-00000001", version=1)
    again = Trainer(str(found.path), train, initial=str(tiny_qwen))
    save_load.restore(again, found)
    again.step(batch(2, train))
    assert all(torch.equal(a, b) for a, b in zip(trainer.lm.parameters(), again.lm.parameters(), strict=True))
    other = Trainer(str(found.path), Train(), initial=str(tiny_qwen))
    with pytest.raises(
        SetUpError, match=f"train.optimizer is 'adamw', but the checkpoint .*step-00000001 continues '{name}'"
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
def test_a_wrong_optimizer_is_refused_with_the_reason(optimizer: Any, check: str, says: str) -> None:
    assert says in flaws(optimizer).get(check, "passed")
