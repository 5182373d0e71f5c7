"""Our losses and advantages give TRL's numbers, which scripts/trl_golden.py wrote down and a long test computes anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.episodes import make_group
from support.families import tokenizer_of
from support.tiny_model import tiny_tokenizer
from swarmq.config import Loss, Train
from swarmq.learner.methods.credit import compute_advantages
from swarmq.learner.methods.loss_weights import normalization_units, token_weight
from swarmq.learner.methods.losses import LossInputs
from swarmq.learner.methods.policy_loss import policy_loss
from swarmq.learner.teachers.token_alignment import divide, list_ends

GOLDEN = json.loads(Path(__file__).with_name("trl_golden.json").read_text())
GIVEN = GOLDEN["given"]
TEXT = "Zwölf Boxkämpfer, 北京 🙂 x**2\n  return 42."
OVER_CANDIDATES = "distill, token, "
SCRIPT = Path(__file__).parents[4] / "scripts" / "trl_golden.py"


@pytest.mark.parametrize("case", [case for case in GOLDEN["computed"] if not case.startswith(OVER_CANDIDATES)])
def test_loss_and_gradient_are_trls(case: str) -> None:
    name, normalisation, *more = case.split(", ")
    lengths = GIVEN["lengths"]
    calls = torch.tensor([call for call, length in enumerate(lengths) for _ in range(length)])
    logprobs, behavior_logprobs, reference = (
        torch.tensor(GIVEN[key], dtype=torch.float64) for key in ("theta", "mu", "reference")
    )
    if name in {"sft", "distill"}:
        logprobs = logprobs.clamp(max=-1e-3)
    if more in (["kl"], ["entropy"]) or name == "distill":
        behavior_logprobs = logprobs.clone()
    logprobs.requires_grad_()
    advantages = torch.tensor(GIVEN["advantages"], dtype=torch.float64)[calls]
    tokens = LossInputs(logprobs, behavior_logprobs, advantages, calls, len(lengths))
    if name == "distill":
        tokens = tokens._replace(teacher=reference)
    if "kl" in more:
        tokens = tokens._replace(reference=reference)
    tokens = tokens._replace(entropies=torch.tensor(GIVEN["entropies"], dtype=torch.float64))
    if "proximal" in more:
        tokens = tokens._replace(proximal=reference)
    rule = Loss(
        name=name,
        kl=0.1 if "kl" in more else 0.0,
        ratio_cap=1.2 if "proximal" in more else 20.0,
        entropy_bonus=0.05 if "entropy" in more else 0.0,
    )
    weights = torch.tensor(
        [
            token_weight(normalisation, episode_tokens=length, constant_length=GIVEN["constant_length"])
            for length in lengths
        ],
        dtype=torch.float64,
    )[calls]
    count = sum(lengths) if normalization_units(normalisation) == "tokens" else len(lengths)
    loss = (policy_loss(tokens, rule).per_token * weights).sum() / count
    loss.backward()
    wanted = GOLDEN["computed"][case]
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-6)
    assert logprobs.grad is not None
    if {"corrected", "entropy"} & {*more}:
        return
    assert logprobs.grad.tolist() == pytest.approx(wanted["gradient"], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("case", [case for case in GOLDEN["computed"] if case.startswith(OVER_CANDIDATES)])
def test_distillation_over_candidates_is_trls(case: str) -> None:
    candidates, of_teacher = (
        torch.tensor([[-torch.inf if value is None else value for value in row] for row in GIVEN[key]]).double()
        for key in ("candidates", "teacher_candidates")
    )
    candidates.requires_grad_()
    none = torch.zeros(len(candidates), dtype=torch.float64)
    tokens = LossInputs(none, none, none, torch.arange(len(none)), len(none))
    tokens = tokens._replace(candidates=candidates, teacher_candidates=of_teacher)
    beta = float(case.removeprefix(OVER_CANDIDATES))
    loss = policy_loss(tokens, Loss(name="distill", top_k=5, distill_beta=beta)).per_token.mean()
    loss.backward()
    wanted = GOLDEN["computed"][case]
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-5)
    assert candidates.grad is not None
    assert candidates.grad.flatten().tolist() == pytest.approx(wanted["gradient"], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", GOLDEN["advantages"])
def test_advantages_are_trls(name: Any) -> None:
    rewards, wanted = GIVEN["rewards"], GOLDEN["advantages"][name]
    size = len(rewards) // 2
    groups = [make_group("a", tuple(rewards[:size]), turns=1), make_group("b", tuple(rewards[size:]), turns=1)]
    made = compute_advantages(groups, Train(advantage=name))
    got = [made[episode.episode_id][0] for group in groups for episode in group]
    assert got == pytest.approx(wanted, rel=1e-3)  # to the epsilon beside the deviation


@pytest.mark.parametrize("family", GOLDEN["aligned"])
def test_spans_of_two_tokenizers_end_where_trls_do_but_not_within_a_character(family: str) -> None:
    sides = [tiny_tokenizer(), SimpleNamespace(backend_tokenizer=tokenizer_of(family))]
    ends = [list_ends(side, side.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids) for side in sides]
    for own, spans, groups in zip(ends, divide(*ends), GOLDEN["aligned"][family], strict=True):
        wanted = [last for *_, last in groups if own[last] is not None]
        assert [at for at in range(len(own)) if at + 1 == len(own) or spans[at + 1] > spans[at]] == wanted
        assert len(wanted) > 10


@pytest.mark.slow
def test_the_numbers_are_those_of_the_installed_trl(tmp_path: Path) -> None:
    """In a process of its own: TRL warns while it is imported, and takes seconds for it."""
    written = tmp_path / "golden.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, written],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    computed, kept = (dict(_numbers(golden)) for golden in (json.loads(written.read_text()), GOLDEN))
    assert computed.pop("trl") == kept["trl"] == version("trl")
    assert computed.keys() == kept.keys() - {"trl"}
    for where, value in computed.items():
        wanted = None if kept[where] is None else pytest.approx(kept[where], rel=1e-5, abs=1e-9)
        assert value == wanted, where


def _numbers(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf, by the way to it."""
    if not isinstance(tree, dict | list):
        yield where, tree
        return
    for key, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _numbers(branch, f"{where}/{key}" if where else str(key))
