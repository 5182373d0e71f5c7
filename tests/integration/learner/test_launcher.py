"""`accelerate launch` as it is: what it tells a learner beside which process it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swarmq.config import SwarmJob
from swarmq.runtime.processes import find_free_port

pytestmark = pytest.mark.slow

LAUNCH = (
    *("-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"),
)


@pytest.mark.timeout(300)
def test_a_learner_that_is_to_be_sharded_by_the_launcher_says_what_shards_it_here(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": str(tiny_qwen)}}})
    (tmp_path / "job.toml").write_text(job.to_toml())
    done = subprocess.run(
        [
            *(sys.executable, *LAUNCH, str(find_free_port()), "--use_fsdp", "--fsdp_version", "2"),
            *("-m", "swarmq", "learner", str(tmp_path / "job.toml"), "--no-collector"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    assert "accelerate launch --use_fsdp (ACCELERATE_USE_FSDP=true) is not supported" in done.stderr, done.stderr
    assert "train.sharding = 'full'" in done.stderr
