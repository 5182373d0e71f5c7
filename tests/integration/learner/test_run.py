"""`swarmq-learner` as it is started, against a real RabbitMQ: one rank and two, stopped by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.episodes import make_group
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.config import SwarmJob
from swarmq.messages import StepReport
from swarmq.runtime.processes import find_free_port

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1500)]  # several learners, one after another

STEPS = 3


def make_job(folder: Path, run: str, model: Path, amqp_url: str, **own: object) -> SwarmJob:
    train = {"learning_rate": 1e-3, "max_steps": STEPS, "checkpoint_every": 2, "gradient_checkpointing": False} | own
    return SwarmJob.build(
        {
            "run": run,
            "folder": str(folder),
            "broker": {"url": amqp_url},
            "groups": {"group_size": 3, "groups_per_batch": 2, "max_staleness": 9},
            "policies": {"main": {"model": str(model), "train": train}},
        }
    )


LAUNCH = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"),
)
"""Processes are all that accelerate starts on a machine without GPUs, whatever the flag is called."""


def start(job: SwarmJob, folder: Path, *, num_gpus: int = 1, accelerate: bool = False) -> subprocess.Popen[bytes]:
    (folder / "job.toml").write_text(job.to_toml())
    launch = (*LAUNCH, str(find_free_port())) if accelerate else ()
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, *launch, "-m", "swarmq", "learner", str(folder / "job.toml")),
                *("--num-gpus", str(num_gpus), "--no-collector"),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", BROKER_ANSWERED_ENV: "1"},
            stdout=log,
            stderr=log,
        )


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Its status; meanwhile the test's own connections live."""
    return await asyncio.to_thread(process.wait, 600)


async def fill(broker: AmqpBroker, job: SwarmJob, groups: range) -> None:
    await broker.declare(job.run, policies=["main"], kinds=["default"])
    for number in groups:
        for episode in make_group(f"g{number}", (0.0, 1.0, 3.0)):
            await broker.publish(topology.ready(job.run, "main"), _of(episode, job.run))


def _of(episode: object, run: str) -> object:
    import msgspec

    turns = tuple(msgspec.structs.replace(turn, run=run) for turn in episode.turns)  # type: ignore[attr-defined]
    return msgspec.structs.replace(episode, run=run, turns=turns)  # type: ignore[type-var]


async def test_one_rank_two_under_accelerate_launch_and_two_that_share_passes_learn_the_same_and_report_every_episode(
    tiny_qwen: Path, tmp_path: Path, amqp_url: str, run_name: str
) -> None:
    weights = []
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=None) as broker:
        for name, launch, train in (
            ("one", {}, {}),
            ("two", {"accelerate": True}, {}),
            ("shared", {"num_gpus": 2}, {"context_parallel": 2}),
        ):
            folder = tmp_path / name
            folder.mkdir()
            job = make_job(folder, f"{run_name}-{name}", tiny_qwen, amqp_url, **train)
            await fill(broker, job, range(2 * STEPS))
            assert await ended(start(job, folder, **launch)) == 0, (folder / "log").read_text()
            told: set[str] = set()
            async with broker.consume(topology.inbox(job.run), prefetch=100) as inbox:
                while len(told) < 3 * 2 * STEPS:
                    message = (await anext(inbox)).message
                    assert isinstance(message, StepReport)
                    told |= {*message.trained}
            depth = (await broker.depths([topology.ready(job.run, "main")]))[topology.ready(job.run, "main")]
            assert depth.ready == 0
            checkpoints = job.run_folder.checkpoints("main")
            weights.append(load_file(checkpoints / f"step-{STEPS:08d}" / "model.safetensors"))
    one, *others = weights
    for name, tensor in one.items():
        for other in others:
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-5)


async def test_a_lost_rank_of_a_shared_out_model_ends_the_learner_with_its_number_and_the_next_start_goes_on(
    tiny_qwen: Path, tmp_path: Path, amqp_url: str, run_name: str
) -> None:
    job = make_job(tmp_path, run_name, tiny_qwen, amqp_url, sharding="full", checkpoint_every=1)
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=None) as broker:
        await fill(broker, job, range(2))
        process = start(job, tmp_path, num_gpus=2)
        async with broker.consume(topology.inbox(job.run), prefetch=100) as inbox:
            assert isinstance((await anext(inbox)).message, StepReport)
            os.kill(rank_of(process, 1), signal.SIGKILL)
            assert await ended(process) != 0
            assert "rank 1 of 2 was killed by SIGKILL (out of memory?)" in (tmp_path / "log").read_text()
            await fill(broker, job, range(2, 2 * STEPS))
            assert await ended(start(job, tmp_path, num_gpus=2)) == 0, (tmp_path / "log").read_text()
    assert (job.run_folder.checkpoints("main") / f"step-{STEPS:08d}" / "manifest.json").exists()


def rank_of(process: subprocess.Popen[bytes], rank: int) -> int:
    """The pid of that rank among the children."""
    children = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    return next(pid for pid in children if f"\0RANK={rank}\0" in _environment(pid))


def _environment(pid: int) -> str:
    with contextlib.suppress(OSError):  # one that has ended has none
        return Path(f"/proc/{pid}/environ").read_text()
    return ""


async def test_a_signal_finishes_with_a_checkpoint_and_a_second_learner_is_refused(
    tiny_qwen: Path, tmp_path: Path, amqp_url: str, run_name: str
) -> None:
    job = make_job(tmp_path, run_name, tiny_qwen, amqp_url)
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=None) as broker:
        await fill(broker, job, range(2))
        process = start(job, tmp_path)
        async with broker.consume(topology.inbox(job.run), prefetch=100) as inbox:
            assert isinstance((await anext(inbox)).message, StepReport)
        other = start(job, tmp_path)
        assert await ended(other) != 0
        assert f"is in use by process {process.pid} on" in (tmp_path / "log").read_text()
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0, (tmp_path / "log").read_text()
    assert (job.run_folder.checkpoints("main") / "step-00000001" / "manifest.json").exists()
