"""A run with methods of the user's own and demonstrations, from the learner's process to the batch log and back."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from support.episodes import make_group
from support.own_methods import FILTER, GROUPING, LOSS, SCHEDULE, write_own_methods
from support.tiny_model import tiny_model
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.config import SwarmJob
from swarmq.learner.store import batch_log
from swarmq.messages import Rollout

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]

OWN = {"loss": LOSS, "filter": FILTER, "schedule": SCHEDULE, "grouping": GROUPING}


def write_demonstrations(path: Path, answer: str) -> None:
    chat = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": answer}]
    path.write_text(json.dumps({"messages": chat}))


def learn(job: SwarmJob, folder: Path, max_steps: int) -> None:
    (folder / "job.toml").write_text(job.to_toml())
    command = [sys.executable, "-m", "swarmq", "learner", str(folder / "job.toml"), "--no-collector"]
    last_step = ["--set", f"policies.main.train.max_steps={max_steps}"]
    done = subprocess.run([*command, *last_step], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def episodes(run: str, group: str) -> list[Rollout]:
    return [
        msgspec.structs.replace(e, run=run, turns=tuple(msgspec.structs.replace(t, run=run) for t in e.turns))
        for e in make_group(group, (0.0, 1.0, 3.0))
    ]


async def test_steps_are_repeated_with_the_code_and_demonstrations_that_trained_them_and_the_next_has_the_new_ones(
    tmp_path: Path, amqp_url: str, run_name: str
) -> None:
    methods, chats = write_own_methods(tmp_path), tmp_path / "chats.jsonl"
    write_demonstrations(chats, "It is 42.")
    train = {
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "checkpoint_every": 1,
        "deterministic": True,
        "trackers": [],
        "loss": {"name": LOSS},
        "token_filter": FILTER,
        "schedule": SCHEDULE,
        "grouping": GROUPING,
        "options": {"hold": 1},
        "sft": {"demonstrations": str(chats)},
        "gradient_checkpointing": False,
    }
    job = SwarmJob.build(
        {
            "run": run_name,
            "folder": str(tmp_path),
            "methods_folder": str(tmp_path),
            "broker": {"url": amqp_url},
            "groups": {"group_size": 3, "groups_per_batch": 1, "max_staleness": 9},
            "policies": {"main": {"model": str(tiny_model()), "train": train}},
        }
    )
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=None) as broker:
        await broker.declare(job.run, policies=["main"], kinds=["default"])
        for group in "abc":
            for episode in episodes(run_name, group):
                await broker.publish(topology.ready(job.run, "main"), episode)
    learn(job, tmp_path, 2)
    checkpoints = job.run_folder.checkpoints("main")
    trained = load_file(checkpoints / "step-00000002" / "model.safetensors")

    shutil.rmtree(checkpoints)
    before = methods.read_text()
    methods.write_text(before.replace("tokens.logprobs < ", "tokens.logprobs > "))
    write_demonstrations(chats, "It is 43.")
    learn(job, tmp_path, 3)
    again = load_file(checkpoints / "step-00000002" / "model.safetensors")
    assert all(tensor.equal(again[name]) for name, tensor in trained.items())

    records = list(batch_log.read_records(job.run_folder.batch_log("main")))
    sources = [{code.kind: code for code in record.methods if code.source} for record in records if record.episodes]
    assert [{kind: code.name for kind, code in each.items()} for each in sources] == [OWN] * 3
    for text, codes in zip((before, before, methods.read_text()), sources, strict=True):
        for code in codes.values():
            assert (code.source, code.sha256) == (text, hashlib.sha256(text.encode()).hexdigest())
    shown = [record.demonstrations[0].turns[0].sampled_ids for record in records if record.episodes]
    assert shown[0] == shown[1] != shown[2]
