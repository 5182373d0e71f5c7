"""The same gradient and the same weights on one rank and on several, whole or sharded, however the batch is cut.

The objective has a reference model in it, so that one is laid out over the ranks too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support import expert_ranks, learner_ranks
from support.episodes import make_qwen
from support.tiny_model import tiny_experts
from swarmq.config import Loss, Train
from swarmq.learner import checkpoint
from swarmq.learner.records import BatchRecord, Identity, Index
from swarmq.learner.trainer import Trainer

TRAIN = Train(learning_rate=1e-4, warmup_steps=0, loss=Loss(name="reinforce", kl=0.5), token_log=False, trackers=())
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def on_ranks(count: int, model: Path, train: Train, target: Path) -> dict[str, Any]:
    launch(count, learner_ranks.__file__, str(model), msgspec.json.encode(train).decode(), str(target))
    made: dict[str, Any] = torch.load(target)
    return made


def launch(count: int, *program: str) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    subprocess.run(
        [sys.executable, *ranks, *program],
        check=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{Path(learner_ranks.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        },
        timeout=600,
    )


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    reference = make_qwen(tmp_path_factory.mktemp("models") / "reference", seed=1)
    return msgspec.structs.replace(TRAIN, reference=str(reference))


@pytest.fixture(scope="module")
def alone(tiny_qwen: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(1, tiny_qwen, train, tmp_path_factory.mktemp("alone") / "made")


@pytest.mark.slow
@pytest.mark.timeout(1500)  # two launches, one after another
@pytest.mark.parametrize(
    ("count", "changed"),
    [
        (2, {}),
        (4, {"micro_batch_tokens": 88, "layout": "rows"}),
        (2, {"sharding": "full", "micro_batch_tokens": 88, "layout": "rows"}),
    ],
    ids=["two", "four, small rows", "two sharded"],
)
def test_ranks_make_the_gradient_and_the_weights_of_one(
    count: int, changed: dict[str, Any], train: Train, tiny_qwen: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    made = on_ranks(count, tiny_qwen, msgspec.structs.replace(train, **changed), tmp_path / "made")
    assert made["sharded"] == ("sharding" in changed)
    assert_same(made, alone)
    if made["sharded"]:
        one_goes_on(tiny_qwen, train, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ranks_agree_on_what_a_filter_leaves_of_each_episode(tiny_qwen: Path, tmp_path: Path) -> None:
    """Its tokens weigh one by their number, and its calls lie in passes of several ranks."""
    train = msgspec.structs.replace(
        TRAIN,
        loss=Loss(name="reinforce"),
        normalisation="episode",
        ratio_band=(0.8, 1.25),
        layout="rows",
        micro_batch_tokens=88,
    )
    alone, together = (on_ranks(count, tiny_qwen, train, tmp_path / f"{count}") for count in (1, 2))
    assert together["left_out"] == alone["left_out"] > 0
    assert_same(together, alone)


def assert_same(made: dict[str, Any], alone: dict[str, Any]) -> None:
    scale = max(float(g.abs().max()) for g in alone["gradient"].values())
    assert made["gradient"].keys() == alone["gradient"].keys()
    for name, gradient in alone["gradient"].items():
        assert float((made["gradient"][name] - gradient).abs().max()) < 1e-4 * scale, name
    assert made["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(made["weights"][name], weight, rtol=0, atol=2.1e-4, msg=name)


def one_goes_on(model: Path, train: Train, folder: Path) -> None:
    """What two sharded ranks saved, one process loads: a replay and the doctor are such."""
    wanted: dict[str, torch.Tensor] = torch.load(folder / "second")
    found = checkpoint.newest(folder / "checkpoints", Identity(run="r", policy="main", model=str(model)))
    assert found is not None
    trainer = Trainer(str(found.path), train, initial=str(model))
    checkpoint.restore(trainer, found)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    trainer.step(BatchRecord(index=Index(record=2, version=2), episodes=learner_ranks.EPISODES, settings=train))
    after = dict(trainer.named_tensors())
    for name, tensor in wanted.items():
        moved = float((tensor - before[name]).norm())
        assert float((after[name] - tensor).norm()) < 0.02 * moved, name


@pytest.mark.slow
def test_ranks_that_share_experts_out_push_and_save_them_as_the_folder_has_them(tmp_path: Path) -> None:
    model = tiny_experts("qwen3_moe")
    launch(2, expert_ranks.__file__, str(model), str(tmp_path))
    pushed, saved, first = (
        load_file(file)
        for file in (tmp_path / "pushed.safetensors", tmp_path / "model.safetensors", model / "model.safetensors")
    )
    assert {name: tensor.shape for name, tensor in pushed.items()} == {n: t.shape for n, t in first.items()}
    assert saved.keys() == first.keys()
    assert all(torch.equal(pushed[name], tensor) for name, tensor in saved.items())
    assert not torch.equal(pushed[EXPERT], first[EXPERT]), "nothing was learned"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert torch.equal(loaded["model.layers.1.mlp.experts.down_proj"][3], saved[EXPERT])
