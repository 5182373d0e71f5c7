"""`swarmq train` does a whole small run: it stops in order at Ctrl-C, continues with the same command, and ends with its report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.small_job import small_job
from swarmq.config import RunFolder
from swarmq.learner.checkpoint.discovery import list_checkpoints, verify
from swarmq.learner.store.batch_log import read_records
from swarmq.whole_run.report import TrainingRecord

pytestmark = [pytest.mark.broker, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

AGENT = """
from swarmq import ask

def attempt(ep):
    if ep.mode == "train" and ep.attempt == 0 and ep.payload["n"] == 3:
        raise ValueError("broken on purpose")
    text = ask(ep, f"Say {ep.payload['n']}")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
"""


class Train:
    """`swarmq train` in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "train.log"
        self.run = RunFolder(folder / "runs" / "small")
        (folder / "job.toml").write_text(small_job("small", train={"learning_rate": 1e-3}))
        (folder / "small_agent.py").write_text(AGENT)
        for name, numbers in (("tasks", range(8)), ("held-out", range(8, 10))):
            rows = (json.dumps({"id": f"{name}-{n}", "n": n}) for n in numbers)
            (folder / f"{name}.jsonl").write_text("\n".join(rows))

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "swarmq", "train", "job.toml", "--agent", "small_agent:attempt"]
        environment = {key: value for key, value in os.environ.items() if key != "SWARMQ_AMQP_URL"}
        with self.log.open("wb") as sink:
            return subprocess.Popen(
                [*command, "--held-out", "held-out.jsonl", *more],
                cwd=self.folder,
                env=environment,
                stdout=sink,
                stderr=sink,
            )

    def rows(self) -> dict[str, str]:
        """First cell -> second cell of the report's tables."""
        lines = [line.strip("| ").split(" | ") for line in self.run.report.read_text().splitlines() if "| " in line]
        return {cells[0]: cells[1] for cells in lines}

    def versions(self) -> list[int]:
        return [one.index.version for one in read_records(self.run.batch_log("main")) if one.index.trained]


def test_a_run_is_interrupted_continued_and_reported(tmp_path):
    train = Train(tmp_path)
    process = train.start()
    try:
        while not re.search(r"step \d+: reward", train.log.read_text()):  # the test's own deadline ends this
            assert process.poll() is None, train.log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(900) == 0, train.log.read_text()
        told = train.log.read_text()
        reached = train.versions()[-1]
        assert f"stopped after step {reached} of main; the same command continues" in told
        assert "held-out reward, version 0" in train.rows()
        assert int(train.rows()["steps"]) in {reached - 1, reached}, (
            "the newest batch may be in the log and not trained yet"
        )
        assert told.count("ValueError: broken on purpose") == 1
        assert 'small_agent.py", line 6, in attempt' in told

        process = train.start("--set", f"policies.main.train.max_steps={reached + 2}")
        assert process.wait(900) == 0, train.log.read_text()
    finally:
        process.kill()
        process.wait()
    assert train.versions() == list(range(1, reached + 3))
    rows = train.rows()
    assert rows["steps"] == f"{reached + 2} of {reached + 2}"
    assert {"held-out reward, version 0", f"held-out reward, version {reached + 2}"} <= rows.keys()
    checkpoint = list_checkpoints(train.run.checkpoints("main"))[-1]
    assert verify(checkpoint).version == reached + 2
    assert rows["checkpoint"] == f"`{checkpoint.relative_to(tmp_path)}`"
    assert "failed" in rows
    assert f"report written to {train.run.report.relative_to(tmp_path)}" in train.log.read_text()

    again = train.start("--set", f"policies.main.train.max_steps={reached + 2}")  # nothing to do: nothing is started
    assert again.wait(300) == 0, train.log.read_text()
    assert "starting vLLM" not in train.log.read_text()

    record = TrainingRecord.load(train.run.training)  # as a call leaves it that was killed after the last step
    del record.held_out[reached + 2]
    record.save(train.run.training)
    again = train.start("--set", f"policies.main.train.max_steps={reached + 2}")
    assert again.wait(900) == 0, train.log.read_text()
    assert f"held-out reward, version {reached + 2}" in train.rows()
    assert train.versions() == list(range(1, reached + 3)), "nothing is trained"
