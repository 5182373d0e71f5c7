"""Ranks on two hosts, each a launcher with folders of its own: they share neither a disk nor a job file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration.learner.test_run import STEPS, fill, make_job
from support.launch import torchrun
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.config import SwarmJob
from swarmq.runtime.processes import find_free_port

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]


def accelerate(host: int, port: int) -> list[str]:
    return [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=2", f"--machine_rank={host}"),
        *("--num_processes=2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}"),
        *("--mixed_precision=no", "--dynamo_backend=no"),
    ]


def start(launch: list[str], folder: Path) -> subprocess.Popen[bytes]:
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


@pytest.mark.parametrize("launcher", [torchrun, accelerate])
async def test_ranks_on_two_hosts_learn_what_one_learns_and_only_rank_0_has_job_model_and_run_folder(
    launcher: Callable[..., list[str]], tiny_qwen: Path, tmp_path: Path, amqp_url: str, run_name: str
) -> None:
    weights = {}
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=None) as broker:
        for name, hosts in (("one", 1), ("two", 2)):
            first, second = (tmp_path / f"{name}-{host}" for host in range(2))
            first.mkdir()
            job = make_job(first, f"{run_name}-{name}", tiny_qwen, amqp_url)
            (first / "job.toml").write_text(job.to_toml())
            await fill(broker, job, range(2 * STEPS))
            port = find_free_port()
            launches = [launcher(host, port) for host in range(hosts)] if hosts > 1 else [[]]
            started = [start(each, folder) for each, folder in zip(launches, (first, second), strict=False)]
            assert await asyncio.gather(*(asyncio.to_thread(each.wait, 300) for each in started)) == [0] * hosts, logs(
                tmp_path
            )
            weights[name] = load_file(newest(job) / "model.safetensors")
            if hosts > 1:
                assert [path.name for path in second.rglob("*") if path.is_file()] == ["log"]
    for name, tensor in weights["one"].items():
        torch.testing.assert_close(weights["two"][name], tensor, rtol=1e-3, atol=2e-5)


def newest(job: SwarmJob) -> Path:
    return job.run_folder.checkpoints("main") / f"step-{STEPS:08d}"
