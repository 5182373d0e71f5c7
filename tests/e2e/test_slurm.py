"""`swarmq slurm` on a real Slurm: a run whose learner spans two of three nodes reaches its time limit, loses its first node, and goes on
where it was each time.

The first node's engine is one that runs already, as vLLM would take most of the time of each start. The third node starts its own.
"""

from __future__ import annotations

import contextlib
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
import tomli_w

from support.engine import SECRET, running_engine
from support.figures import write_figures
from support.slurm import Cluster, cluster, why_not
from support.tiny_model import tiny_model
from support.toy_task import Toy, toy_settings
from swarmq import SwarmClient
from swarmq.config import RunFolder
from swarmq.engine.auth import SECRET_ENV
from swarmq.learner.store.batch_log import read_records

pytestmark = [
    pytest.mark.broker,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
STEPS = 12
LEFT_MIN = 4
"""Minutes until the time limit that are less than the notice which the script asks for."""
WAIT_S = 700.0


def work(invite: str, spool: Path) -> None:
    """Attempt tasks for as long as the process lives."""
    with SwarmClient(invite, spool=spool) as client:
        toy = Toy()
        while True:
            toy.play(client)


class Batch:
    """A submitted job."""

    def __init__(self, slurm: Cluster, folder: Path, engine: str) -> None:
        self.slurm, self.run = slurm, RunFolder(folder / "runs/toy")
        settings = toy_settings(tiny_model()) | {"folder": "runs"}
        settings["policies"]["main"]["engine"] |= {"urls": [engine]}
        settings["policies"]["main"]["train"] |= {"max_steps": STEPS, "checkpoint_every": 100, "learning_rate": 1e-6}
        (folder / "job.toml").write_text(tomli_w.dumps(settings))
        done = subprocess.run(
            [sys.executable, "-m", "swarmq", "slurm", "job.toml", "--nodes=3", "--learner-nodes=2", "--time=60", "--submit"],
            cwd=folder, env=slurm.environment | {SECRET_ENV: SECRET}, capture_output=True, text=True, check=False,
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

    def checkpoint(self) -> int:
        """Step of the newest checkpoint."""
        return max(
            (int(path.name.removeprefix("step-")) for path in self.run.checkpoints("main").glob("step-*")), default=0
        )

    def wait_for_ranks(self, *nodes: str) -> None:
        """Wait until the learner has a rank on each of these nodes, and on no other one."""
        self.wait("the ranks", lambda: self.slurm.find_nodes(b"\0RANK=") == set(nodes))

    def come_near_limit(self) -> None:
        """Lower the time limit, so that less than Slurm's notice is left."""
        hours, minutes, _ = map(int, self.shown()["RunTime"].split(":"))
        limit = f"TimeLimit={60 * hours + minutes + LEFT_MIN}"
        self.slurm("scontrol", "update", f"JobId={self.number}", limit)

    def wait_for_requeue(self, number: int) -> None:
        self.wait("the requeued job", lambda: self.shown()["Restarts"] == str(number))

    def start_again(self, nodes: str) -> None:
        """Let the requeued job start at once rather than in two minutes, which Slurm only does once the former start is over."""
        former = self.invite()

        def starts() -> bool:
            if (state := self.shown()["JobState"]) == "PENDING":
                update = ("scontrol", "update", f"JobId={self.number}")
                self.slurm(*update, "TimeLimit=60")
                with contextlib.suppress(subprocess.CalledProcessError):  # it has started since
                    self.slurm(*update, "StartTime=now")
            return state == "RUNNING"

        self.wait("the next start", starts)
        self.wait("a new invite", lambda: self.invite() != former)
        assert self.shown()["NodeList"] == nodes

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


def test_a_run_on_slurm_goes_on_where_it_was_after_its_time_limit_and_the_loss_of_its_first_node(
    tmp_path: Path,
) -> None:
    home = Path(tempfile.mkdtemp(dir="/var/tmp"))  # short enough for a socket
    try:
        with running_engine(tiny_model(), tmp_path / "engine.log") as engine, cluster(home) as slurm:
            batch = Batch(slurm, tmp_path, engine.url)
            batch.wait("an invite for clients", batch.invite)
            assert batch.shown()["NodeList"] == "n[1-3]"
            batch.wait("an engine on the third node", lambda: len(batch.engines()) == 2)
            batch.wait_for_ranks("n1", "n2")
            batch.train(until=2)

            batch.come_near_limit()
            batch.wait_for_requeue(1)
            stopped_at = batch.step()
            assert batch.checkpoint() == stopped_at, "the learner was not stopped in order"
            batch.start_again("n[1-3]")
            batch.train(until=stopped_at + 1)

            slurm.lose("n1")
            lost_at = batch.step()
            batch.wait_for_requeue(2)
            batch.start_again("n[2-4]")
            assert batch.step() >= lost_at
            batch.wait_for_ranks("n2", "n3")
            batch.train(until=STEPS)
            batch.wait("the end", lambda: batch.shown()["JobState"] == "COMPLETED")
            assert "stopped. " in batch.log()
            records = [record for record in read_records(batch.run.batch_log("main")) if record.index.trained]
            assert [record.index.version for record in records] == list(range(1, STEPS + 1))
            times = Counter(episode for record in records for episode in record.index.trained)
            assert set(times.values()) == {1}, "trained twice"
            write_figures(slurm_requeued=2)
    finally:
        shutil.rmtree(home)
