"""Ranks on two hosts, each a launcher with folders of its own: they share neither a disk nor a job file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration.learner.test_run import STEPS, fill, make_job
from support.launch import torchrun
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.runtime.processes import find_free_port

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]


def accelerate(host: int, port: int) -> list[str]:
    return [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=2", f"--machine_rank={host}"),
        *("--num_processes=2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}"),
        *("--mixed_precision=no", "--dynamo_backend=no"),
    ]


def start(launch: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """A host's launcher; rank 0's host has a job file there."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *launch, "-m", "swarmq", "learner", "job.toml", "--no-collector"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", BROKER_ANSWERED_ENV: "1", "TMPDIR": str(folder / "tmp")},
            stdout=log,
            stderr=log,
        )


def logs(folder: Path) -> str:
    return "\n".join(f"== {each}\n{each.read_text()}" for each in sorted(folder.rglob("log")))


async def train(folder: Path, run: str, model: Path, amqp_url: str, launches: Sequence[Sequence[str]]) -> Path:
    """Train on hosts with folders of their own, the first of which has the job; return the checkpoint."""
    folders = [folder / str(host) for host in range(len(launches))]
    folders[0].mkdir(parents=True)
    job = make_job(folders[0], run, model, amqp_url)
    (folders[0] / "job.toml").write_text(job.to_toml())
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=None) as broker:
        await fill(broker, job, range(2 * STEPS))
        started = [start(launch, each) for launch, each in zip(launches, folders, strict=True)]
        statuses = await asyncio.gather(*(asyncio.to_thread(each.wait, 500) for each in started))
    assert not any(statuses), logs(folder)
    return job.run_folder.checkpoints("main") / f"step-{STEPS:08d}" / "model.safetensors"


async def test_ranks_on_two_hosts_learn_what_one_learns_and_only_rank_0_has_job_model_and_run_folder(
    tiny_qwen: Path, tmp_path: Path, amqp_url: str, run_name: str
) -> None:
    found = {}
    for name, launcher in {"one": None, "torchrun": torchrun, "accelerate": accelerate}.items():
        port = find_free_port()
        launches = [launcher(host, port) for host in range(2)] if launcher else [[]]
        checkpoint = await train(tmp_path / name, f"{run_name}-{name}", tiny_qwen, amqp_url, launches)
        found[name] = load_file(checkpoint)
        if launcher:
            assert [each.name for each in (tmp_path / name / "1").rglob("*") if each.is_file()] == ["log"]
    for name, tensor in found["one"].items():
        for launcher_name in ("torchrun", "accelerate"):
            torch.testing.assert_close(found[launcher_name][name], tensor, rtol=1e-3, atol=2e-5)


def test_a_rank_0_on_a_host_without_the_job_says_how_hosts_are_numbered(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarmq", "learner", "job.toml"],
        cwd=tmp_path,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "job.toml: no such file on" in done.stderr
    assert "--node-rank with --master-addr" in done.stderr
