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
from swarmq.config import Loss, Train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_sharded_ranks_step_save_and_go_on(cpu_offload: bool, tmp_path: Path) -> None:
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
    target = tmp_path / "made"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", learner_ranks.__file__)
    subprocess.run(
        [sys.executable, *launch, str(model), msgspec.json.encode([train]).decode(), str(target)],
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{Path(learner_ranks.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        },
        timeout=500,
    )
    [made] = torch.load(target)
    assert made["sharded"]
