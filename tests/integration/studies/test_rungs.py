"""A trial that is promoted from rung to rung makes the training that it would have made without rungs, to the bit, and repeats no step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.numpy import load_file

from support import learner_process
from support.episodes import make_group, make_qwen
from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.studies.study import TrialPlan
from swarmq.studies.training import RUN, choose_settings
from swarmq.studies.trial import Attempt, Order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4


def train(root: Path, model: Path, rungs: list[int]) -> None:
    """Train a trial rung by rung, each time in a process of its own, with episodes that are the same for all trials."""
    for folder in ("die", "freeze", "slow"):
        (root / folder).mkdir(parents=True)
    policy = {
        "model": str(model),
        "train": {
            "learning_rate": 1e-3,
            "schedule": "linear",
            "warmup_steps": 1,
            "max_steps": STEPS,
            "deterministic": True,
            "gradient_checkpointing": False,
        },
    }
    groups = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 100}
    (root / "study-job.toml").write_text(
        SwarmJob.build({"run": "r", "groups": groups, "policies": {"main": policy}}).to_toml()
    )
    for number in range(STEPS * 2):
        for episode in make_group(f"g{number}", (0.0, 1.0)):
            learner_process.put(root, topology.ready(RUN, "main"), msgspec.structs.replace(episode, run=RUN))
    plan = TrialPlan(job=str(root / "study-job.toml"), agent="agent:attempt", max_seconds=9)
    for steps in rungs:
        attempt = Attempt(settings={}, seed=3, steps=steps, folder=str(root))
        sets, _ = choose_settings(Order(plan=plan, attempt=attempt))
        (root / "job.toml").write_text(SwarmJob.load(root / "study-job.toml", sets=sets).to_toml())
        run = subprocess.run(
            [sys.executable, learner_process.__file__, "trainer", str(root)],
            env={
                **os.environ,
                "PYTHONPATH": f"{Path(learner_process.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr


def test_a_promoted_training_is_the_same_to_the_bit_and_repeats_no_step(tmp_path: Path) -> None:
    model = make_qwen(tmp_path / "model")
    train(tmp_path / "at-once", model, [STEPS])
    train(tmp_path / "by-rungs", model, [2, STEPS])
    steps = [msgspec.json.decode(line) for line in (tmp_path / "by-rungs" / "steps.jsonl").read_bytes().splitlines()]
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    last = [tmp_path / name / RUN / "main" / "checkpoints" / f"step-{STEPS:08d}" for name in ("by-rungs", "at-once")]
    ours, wanted = (load_file(folder / "model.safetensors") for folder in last)
    assert ours.keys() == wanted.keys()
    assert all(ours[name].tobytes() == wanted[name].tobytes() for name in wanted)
    states = [torch.load(next(folder.glob("state/optimizer*")), weights_only=False) for folder in last]
    assert str(states[0]) == str(states[1])
