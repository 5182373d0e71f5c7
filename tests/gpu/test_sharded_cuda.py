"""Several GPUs that share out a policy, with its parameters in host memory and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from support import learner_ranks
from support.episodes import make_qwen
from support.same_gradient import assert_same_gradient
from swarmq.config import Loss, Train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_sharded_ranks_step_save_and_go_on_with_one_gradient_wherever_parameters_lie(
    cpu_offload: bool, tmp_path: Path
) -> None:
    model, reference = make_qwen(tmp_path / "model"), make_qwen(tmp_path / "reference", seed=1)
    train = Train(
        sharding="full",
        cpu_offload=cpu_offload,
        micro_batch_tokens=88,
        layout="rows",
        mixed_precision="no",
        loss=Loss(name="reinforce", kl=0.5),
        reference=str(reference),
        token_log=False,
        trackers=(),
    )
    compared = [msgspec.structs.replace(train, cpu_offload=False)] if cpu_offload else []
    target = tmp_path / "made"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", learner_ranks.__file__)
    subprocess.run(
        [sys.executable, *launch, str(model), msgspec.json.encode([train, *compared]).decode(), str(target)],
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{Path(learner_ranks.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        },
        timeout=500,
    )
    made, *others = torch.load(target, map_location="cpu")  # the gradient lies where its parameters do
    assert made["sharded"]
    assert len(others) == cpu_offload
    for other in others:
        assert other["sharded"]
        assert_same_gradient(made["gradient"], other["gradient"])
