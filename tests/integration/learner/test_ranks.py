"""The same gradient and the same weights on one rank and on several, whole or sharded, however the batch is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from support import learner_ranks
from swarmq.config import Loss, Train

TRAIN = Train(learning_rate=1e-4, warmup_steps=0, loss=Loss(name="reinforce"), token_log=False, trackers=())


def on_ranks(count: int, model: Path, train: Train, target: Path) -> dict[str, Any]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run(
        [
            *(launch if count > 1 else [sys.executable]),
            learner_ranks.__file__,
            str(model),
            msgspec.json.encode(train).decode(),
            str(target),
        ],
        check=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{Path(learner_ranks.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        },
        timeout=300,
    )
    made: dict[str, Any] = torch.load(target)
    return made


@pytest.fixture(scope="module")
def alone(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(1, tiny_qwen, TRAIN, tmp_path_factory.mktemp("alone") / "made")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("count", "changed"),
    [(2, {}), (4, {"micro_batch_tokens": 88, "layout": "rows"}), (2, {"sharding": "full"})],
    ids=["two", "four, small rows", "two sharded"],
)
def test_ranks_make_the_gradient_and_the_weights_of_one(
    count: int, changed: dict[str, Any], tiny_qwen: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    made = on_ranks(count, tiny_qwen, msgspec.structs.replace(TRAIN, **changed), tmp_path / "made")
    assert made["sharded"] == ("sharding" in changed)
    scale = max(float(g.abs().max()) for g in alone["gradient"].values())
    assert made["gradient"].keys() == alone["gradient"].keys()
    for name, gradient in alone["gradient"].items():
        assert float((made["gradient"][name] - gradient).abs().max()) < 1e-4 * scale, name
    assert made["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(made["weights"][name], weight, rtol=0, atol=2.1e-4, msg=name)
