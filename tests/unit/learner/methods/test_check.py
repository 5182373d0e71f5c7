"""What `swarmq check-method` finds, and that every built-in method and those of the how-to page pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from support.own_methods import ADVANTAGE, FILTER, LOSS, OPTIMIZER, REWARD, SCHEDULE, write_own_methods
from swarmq import cli
from swarmq.config import ADVANTAGES, LOSSES, Loss, Train
from swarmq.learner.methods import registry
from swarmq.learner.methods.advantages.centered import centered
from swarmq.learner.methods.check import check_method, find_kind
from swarmq.learner.methods.losses import LossInputs, TokenLoss, compute_ratio
from swarmq.learner.methods.losses.reinforce import reinforce

OVER_CANDIDATES = Loss(name="distill", top_k=3, distill_beta=0.5)


def flaws(kind: str, function: Callable[..., Any], train: Train | None = None) -> dict[str, str]:
    return {check.name: check.flaw for check in check_method(kind, function, train or Train()) if check.flaw}


@pytest.mark.parametrize("loss", [*(Loss(name=name) for name in LOSSES), OVER_CANDIDATES], ids=lambda loss: loss.name)
def test_every_built_in_loss_passes_and_its_gradient_is_that_of_its_float64_twin(loss: Loss) -> None:
    train = Train(loss=loss, teacher="t" if loss.name == "distill" else None)
    made = list(check_method("loss", registry.find_method("loss", loss.name), train))
    assert [check for check in made if check.flaw] == []
    assert len(made) == 8
    (twin,) = (check.figure for check in made if "float64" in check.name)
    assert twin is not None
    assert twin < 1e-5


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_built_in_advantage_passes(name: str) -> None:
    assert flaws("advantage", registry.find_method("advantage", name), Train(advantage=name)) == {}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("loss", LOSS),
        ("advantage", ADVANTAGE),
        ("schedule", SCHEDULE),
        ("optimizer", OPTIMIZER),
        ("filter", FILTER),
        ("reward", REWARD),
    ],
)
def test_the_methods_of_the_page_pass(tmp_path: Path, kind: str, name: str) -> None:
    write_own_methods(tmp_path)
    registry.adopt([registry.read_code(kind, name, str(tmp_path))])
    function = registry.find_method(kind, name)
    assert find_kind(name, function) == kind
    assert flaws(kind, function) == {}


class Slipped(torch.autograd.Function):
    """x, with the gradient of 2x."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


def plain(tokens: LossInputs, weight: torch.Tensor | float = 1.0) -> TokenLoss:
    return TokenLoss.whole(-weight * tokens.advantages * tokens.logprobs, tokens.advantages)


calls_so_far = 0


def counting(tokens: LossInputs, _: Loss) -> TokenLoss:
    global calls_so_far  # noqa: PLW0603
    calls_so_far += 1
    return plain(tokens, calls_so_far)


seen: list[int] = []


def remembering(tokens: LossInputs, _: Loss) -> TokenLoss:
    """Counts the sizes that it has seen."""
    if len(tokens.calls) not in seen:
        seen.append(len(tokens.calls))
    return plain(tokens, len(seen))


def changing(tokens: LossInputs, _: Loss) -> TokenLoss:
    tokens.behavior_logprobs.add_(1)
    return plain(tokens)


def in_half_precision(tokens: LossInputs, _: Loss) -> TokenLoss:
    narrow = torch.float64 if tokens.logprobs.dtype == torch.float64 else torch.float16
    return plain(
        tokens, compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs).to(narrow).to(tokens.logprobs.dtype)
    )


@pytest.mark.parametrize(
    ("loss", "check", "says"),
    [
        (lambda t, _: TokenLoss.whole(-t.logprobs.sum()), "shape", "per_token is a tensor of shape [] and torch.float64, not one value for"),
        (lambda t, _: -t.logprobs, "shape", "returned a Tensor, not a TokenLoss"),
        (lambda t, _: TokenLoss(-t.logprobs, t.advantages, None), "shape", "effects is"),
        (lambda t, _: plain(t._replace(logprobs=t.logprobs.detach())), "shape", "no gradient reaches tokens.logprobs"),
        (lambda t, _: 1 / 0, "shape", "raised ZeroDivisionError: division by zero"),
        (lambda t, _: plain(t, (t.logprobs - t.behavior_logprobs).detach().exp()), "finite", "inf for a token with logprobs"),
        (changing, "inputs unchanged", "it changes tokens.behavior_logprobs in place"),
        (lambda t, _: plain(t, random.random()), "no state", "two calls with equal inputs return different values"),
        (lambda t, _: plain(t, torch.rand(())), "no state", "two calls with equal inputs return different values"),
        (counting, "no state", "two calls with equal inputs return different values"),
        (remembering, "no state", "it keeps state: its result depends on earlier calls"),
        (lambda t, _: plain(t._replace(advantages=t.advantages - t.advantages.mean())), "packing and ranks", "depends on the other model calls"),
        (lambda t, _: plain(t, 1.0 + t.calls), "order of model calls", "depends on the order of the model calls"),
        (in_half_precision, "gradient in float32 and float64", "differ by"),
        (lambda t, _: plain(t._replace(logprobs=Slipped.apply(t.logprobs))), "gradient and finite differences", "differs from finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_loss_is_refused_with_the_reason(loss: Any, check: str, says: str) -> None:
    assert says in flaws("loss", loss).get(check, "passed")


@pytest.mark.parametrize(
    ("keep", "check", "says"),
    [
        (lambda t, among, train: t.logprobs, "shape", "not whether to keep each of"),
        (lambda t, among, train: among & ~among, "shape", "it keeps no token at all"),
        (
            lambda t, among, train: t.logprobs > t.logprobs.mean(),
            "packing and ranks",
            "depends on the other model calls",
        ),
    ],
)
def test_a_wrong_filter_is_refused_with_the_reason(keep: Any, check: str, says: str) -> None:
    assert says in flaws("filter", keep).get(check, "passed")


@pytest.mark.parametrize("name", ["row_k3_max", "ratio_band"])
def test_every_built_in_filter_passes(name: str) -> None:
    train = Train(row_k3_max=0.05, ratio_band=(0.7, 1.4))
    assert flaws("filter", registry.find_method("filter", name), train) == {}


@pytest.mark.parametrize(
    ("transform", "check", "says"),
    [
        (lambda e, reward, train: None, "shape", "a reward is None, not a finite float"),
        (lambda e, reward, train: reward + random.random(), "no state", "random numbers"),
    ],
)
def test_a_wrong_reward_transform_is_refused_with_the_reason(transform: Any, check: str, says: str) -> None:
    assert says in flaws("reward", transform).get(check, "passed")


def test_what_is_detached_counts_as_constant_for_finite_differences() -> None:
    """Also what is computed without gradient; a ratio that is not held constant has another slope."""

    def without_gradient(tokens: LossInputs, _: Loss) -> TokenLoss:
        with torch.no_grad():
            ratio = compute_ratio(tokens.logprobs, tokens.behavior_logprobs)
        return plain(tokens, ratio)

    assert flaws("loss", without_gradient) == flaws("loss", reinforce) == {}


@pytest.mark.parametrize(
    ("method", "check", "says"),
    [
        (lambda s, t, b: centered(s, t, b)[1:], "shape", "returned 7 results for 8 sets"),
        (lambda s, t, b: [{"x": {"": 1.0}} for _ in s], "shape", "a result has values for {'x': {''}}"),
        (lambda s, t, b: [{} for _ in s], "shape", "no advantage at all"),
        (lambda s, t, b: [{e: {c: float("nan") for c in own} for e, own in x.rewards.items()} for x in s], "finite", "an advantage is nan"),
        (lambda s, t, b: [(x.rewards.pop("0-0", 0) and {}) or x.rewards for x in s], "inputs unchanged", "changes the rewards in place"),
        (lambda s, t, b: [{e: {c: r + random.random() for c, r in own.items()} for e, own in x.rewards.items()} for x in s],
         "no state", "random numbers, or keeps state"),
        (lambda s, t, b: [{e: dict.fromkeys(own, float(n)) for n, (e, own) in enumerate(x.rewards.items())} for x in s],
         "order of groups and episodes", "in another order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_advantage_is_refused_with_the_reason(method: Any, check: str, says: str) -> None:
    assert says in flaws("advantage", method).get(check, "passed")


def test_the_command_names_what_failed_and_its_status_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own_methods(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    passed = run(cli.main, ["check-method", LOSS, "--set", "loss.options.cap=2.0"])
    assert passed.exit_code == 0, passed.output
    assert passed.output.endswith(f"{LOSS} (loss): all checks passed\n")
    path = tmp_path / "wrong_loss.py"
    path.write_text(
        "from swarmq.learner.methods.losses import TokenLoss\n\n\ndef wrong(tokens, loss):\n    return TokenLoss.whole(-tokens.logprobs[1:])\n"
    )
    failed = run(cli.main, ["check-method", "wrong_loss:wrong"])
    assert failed.exit_code == 1
    assert "FAILED  shape: per_token is a tensor of shape" in failed.output
    assert "wrong_loss:wrong (loss): 1 checks failed" in failed.output
    missing = run(cli.main, ["check-method", "no_such:loss"])
    assert missing.output.startswith("swarmq: there is no Python module 'no_such' in ")
