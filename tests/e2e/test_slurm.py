"""`swarmq slurm` on a real Slurm: a run comes up on two nodes, loses its first one, and goes on where it was on two others."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from openai import OpenAI

from support.slurm import Cluster, cluster, why_not
from support.tiny_model import tiny_model
from swarmq import SwarmClient
from swarmq.config import RunFolder
from swarmq.learner.store.batch_log import read_records

pytestmark = [
    pytest.mark.broker,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
STEPS = 6
WAIT_S = 700.0
JOB = f"""
run = "toy"
folder = "runs"
[groups]
group_size = 4
groups_per_batch = 2
[policies.main]
model = "{{model}}"
[policies.main.engine]
dtype = "float32"
max_model_len = 512
[policies.main.sampling]
max_tokens = 8
[policies.main.train]
max_steps = {STEPS}
checkpoint_every = 1
"""


def attempt(ep):
    with OpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=8, timeout=300) as client:
        asked = client.chat.completions.create(model=ep.model, messages=[{"role": "user", "content": "write"}])
    return len(asked.choices[0].message.content or "") % 7 / 7


def work(invite: str, spool: Path) -> None:
    """Attempt tasks for as long as the process lives."""
    with SwarmClient(invite, spool=spool) as client:
        while True:
            tasks = [{"id": f"{time.time_ns()}-{number}"} for number in range(4)]
            client.run_episodes_until_all_complete(tasks, attempt, concurrency=8, progress=False)


class Batch:
    """A submitted job."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.run = slurm, RunFolder(folder / "runs/toy")
        (folder / "job.toml").write_text(JOB.format(model=tiny_model()))
        done = subprocess.run(
            [sys.executable, "-m", "swarmq", "slurm", "job.toml", "--nodes=2", "--time=60", "--submit"],
            cwd=folder, env=slurm.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr
        self.number = done.stdout.split()[-1]

    def shown(self) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.slurm("scontrol", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, what: str, fact: Callable[[], object]) -> None:
        until = time.monotonic() + WAIT_S
        while not fact():
            state = self.shown()["JobState"]
            assert time.monotonic() < until, f"{what} did not come; the job is {state}\n{self.log()}"
            assert state not in {"FAILED", "CANCELLED", "TIMEOUT"}, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return "".join(path.read_text() for path in self.run.path.parent.glob("*.log"))[-6000:]

    def invite(self) -> str:
        path = self.run.path / "slurm/client.invite"
        return path.read_text().strip() if path.exists() else ""

    def engines(self) -> list[str]:
        path = self.run.roster
        return list(msgspec.json.decode(path.read_bytes())["main"]) if path.exists() else []

    def step(self) -> int:
        return max((record.index.version for record in read_records(self.run.batch_log("main"))), default=0)

    def train(self, until: int) -> None:
        """Attempt tasks until the batch log has this step. The client is killed then, because it would wait for a run that has ended."""
        client = multiprocessing.get_context("spawn").Process(
            target=work, args=(self.invite(), self.slurm.folder / "spool"), daemon=True
        )
        client.start()
        try:
            self.wait(f"step {until}", lambda: self.step() >= until or not client.is_alive())
            assert self.step() >= until, "the client ended"
        finally:
            client.kill()
            client.join()


def test_a_run_on_slurm_goes_on_from_its_checkpoint_when_its_first_node_is_lost(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(dir="/var/tmp"))  # short enough for a socket
    try:
        with cluster(home) as slurm:
            batch = Batch(slurm, tmp_path)
            batch.wait("an invite for clients", batch.invite)
            first, nodes = batch.invite(), batch.shown()["NodeList"]
            assert nodes == "n[1-2]"
            batch.wait("an engine on the second node", lambda: len(batch.engines()) == 2)
            batch.train(until=2)
            before = batch.step()
            slurm.lose("n1")
            batch.wait("the requeued job", lambda: batch.shown()["Restarts"] == "1")
            slurm("scontrol", "update", f"JobId={batch.number}", "StartTime=now")  # rather than in two minutes
            batch.wait("a new invite", lambda: batch.invite() != first)
            assert batch.shown()["NodeList"] == "n[2-3]"
            assert batch.step() == before
            batch.train(until=STEPS)
            batch.wait("the end", lambda: batch.shown()["JobState"] == "COMPLETED")
            assert "stopped. " in batch.log()
            records = read_records(batch.run.batch_log("main"))
            times = Counter(episode for record in records for episode in record.index.trained)
            assert set(times.values()) == {1}, "trained twice"
            assert batch.step() == STEPS
    finally:
        shutil.rmtree(home)
