"""Ranks that share every pass make the gradient, the weights and the figures of one that computes it alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from support import context_ranks
from support.context_ranks import Case
from support.episodes import make_qwen
from support.forks import CONFIGS, SHARED
from support.launch import launch
from support.same_gradient import assert_same, assert_same_way
from swarmq.config import Lora, Loss, Train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TRAIN = Train(learning_rate=1e-4, warmup_steps=0, micro_batch_tokens=88, trackers=())
HELD = Loss(name="reinforce", kl=0.5)
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "rows", "loss": HELD},
    "the same again": {"layout": "rows", "loss": HELD},
    "trees, by sequence": {"layout": "tree", "loss": Loss(name="gspo", kl=0.5)},
    "trees, windows": {"layout": "tree"},
    "several steps": {"layout": "tree", "loss": HELD, "steps_per_batch": 2},
    "filtered": {"layout": "rows", "normalisation": "episode", "ratio_band": (0.8, 1.25), "row_k3_max": 0.5},
    "adapters": {"layout": "rows", "loss": HELD, "lora": Lora(rank=4, alpha=8.0)},
    "state": {},
}
WINDOWS = "trees, windows"
REFUSED = "train.context_parallel: ranks cannot share the passes of .* set it to 1"
TIMED = {"train_s", "tokens_per_s", "mfu", "gap_p99"}
"""Figures of the clock, and one that jumps from bin to bin."""
Made = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    family, special = CONFIGS["gemma3"]
    windows = AutoModelForCausalLM.from_config(family(**(SHARED | special | {"vocab_size": 128})))
    windows.save_pretrained(folder / "windows")
    MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(
        folder / "state"
    )
    return {
        "model": str(make_qwen(folder / "model")),
        "reference": str(make_qwen(folder / "reference", seed=1)),
        **{name: str(folder / name) for name in ("windows", "state")},
    }


def on_ranks(count: int, models: dict[str, str], target: Path, ways: tuple[str, ...], **changed: Any) -> Made:
    cases = []
    for way in ways:
        train = msgspec.structs.replace(TRAIN, **WAYS[way], **changed)
        if train.loss.kl and not train.lora:
            train = msgspec.structs.replace(train, reference=models["reference"])
        model = models["windows" if way == WINDOWS else "state" if way == "state" else "model"]
        cases.append(Case(model=model, train=train, refused=REFUSED if way == "state" else None))
    launch(count, context_ranks.__file__, msgspec.json.encode(cases).decode(), str(target))
    found = torch.load(target, weights_only=False)
    return dict(zip(ways, found, strict=changed.get("context_parallel", 1) == 1))


@pytest.fixture(scope="module")
def alone(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Made:
    return on_ranks(1, models, tmp_path_factory.mktemp("alone") / "made", tuple(way for way in WAYS if way != "state"))


@pytest.mark.parametrize(
    ("count", "changed"),
    [(2, {}), (4, {}), (2, {"sharding": "full"})],
    ids=["two", "two times two", "two that share the model out"],
)
def test_ranks_that_share_passes_make_the_gradient_the_weights_and_the_figures_of_one(
    count: int, changed: dict[str, Any], models: dict[str, str], tmp_path: Path, alone: Made
) -> None:
    made = on_ranks(count, models, tmp_path / "made", tuple(WAYS), context_parallel=2, **changed)
    for way, ours in made.items():
        assert ours["sharded"] == bool(changed)
        wanted = alone[way]
        if way == "adapters":  # half of which get no gradient in the first step
            moved = [
                name for name, tensor in wanted["before"].items() if not torch.equal(tensor, wanted["weights"][name])
            ]
            weights = (ours["weights"], wanted["weights"], wanted["before"])
            assert_same_way(*({name: each[name] for name in moved} for each in weights))
        else:
            assert_same(ours, wanted)
        for figures, expected in zip(ours["figures"], wanted["figures"], strict=True):
            assert_same_figures(figures, expected, alike=count == 2)
        assert logged(ours) == logged(wanted)
        for first, second in zip(ours["lengths"][::2], ours["lengths"][1::2], strict=True):
            assert first == second, "ranks that share a pass compute as many of its tokens each"
    everything = [number for ours in made.values() for number in ours["sampled"]]
    assert any(0 in numbers for numbers in everything), "some rank has to have a pass of which it scores nothing"
    assert count == 2 or any(any(ours["idle"]) for ours in made.values())
    assert all(sum(made[way]["forks"]) for way in made if made[way]["figures"][0]["layout"] == "tree")
    assert made["filtered"]["left_out"] > 0
    first, again = made["rows"], made["the same again"]
    for what in ("gradient", "weights"):
        assert all(torch.equal(tensor, again[what][name]) for name, tensor in first[what].items())


def assert_same_figures(ours: dict[str, Any], wanted: dict[str, Any], *, alike: bool) -> None:
    """`alike`: the batch is cut into the same passes."""
    assert ours.keys() == wanted.keys()
    varying = TIMED if alike else TIMED | {"passes", "tokens_computed", "flops", "layout_reason"}
    for name in ours.keys() - varying:
        if isinstance(wanted[name], float):
            assert math.isclose(ours[name], wanted[name], rel_tol=1e-4, abs_tol=1e-6), (name, ours[name], wanted[name])
        else:
            assert ours[name] == wanted[name], name


def logged(made: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Every turn that the token log has, over all ranks, with how many tokens it has of it and leaves out."""
    return sorted(
        (turn.call_id, len(turn.logprobs), sum(turn.left_out))
        for tokens in made["tokens"]
        for episode in tokens
        for turn in episode.turns
    )


def test_ranks_that_are_no_whole_groups_are_refused(models: dict[str, str], tmp_path: Path) -> None:
    """By all of them, before they meet."""
    train = msgspec.structs.replace(TRAIN, context_parallel=3)
    says = r"3 ranks share each pass, but the learner has 2 ranks: give it a multiple"
    case = Case(model=models["model"], train=train, refused=says)
    launch(2, context_ranks.__file__, msgspec.json.encode([case]).decode(), str(tmp_path / "made"))
