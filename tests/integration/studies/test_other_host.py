"""Workers that have an invite alone, as on hosts that share no disk with the study: they run its trials, and may be killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest
import tomli_w

from support.studies import FIRST
from support.tls import self_signed
from swarmq.runtime.processes import find_free_port
from swarmq.studies.ledger import StudyFolder, read_ledger
from swarmq.studies.records import TrialFailed, TrialParked, TrialPlanned, TrialResult, TrialStarted
from swarmq.studies.state import StudyState

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]
SWARMQ = [sys.executable, "-m", "swarmq", "study"]
WORK = """
import time
from pathlib import Path
from gain import GAIN

def trial(attempt):
    if attempt.settings["arm"] == 2 and GAIN == 10 and Path.home().name == "gpu2":
        Path("started").touch()
        time.sleep(600)
    if attempt.settings["arm"] == 3:
        raise ValueError("three is too many")
    return {"score": GAIN * attempt.settings["arm"] + len(Path("data/numbers").read_bytes())}
"""
PIECES = 600_000
"""Size of a file that needs several pieces."""


class Hosts:
    """The leader's host, with the study, and others, with an invite alone."""

    def __init__(self, folder):
        self.home, self.others, self.port = folder / "leader", folder / "others", find_free_port()
        self.study = FIRST | {
            "name": f"elsewhere-{os.getpid()}",
            "trial": FIRST["trial"] | {"code": ["gain.py", "data"], "max_seconds": 600},
            "arms": {"a": {"settings": {"arm": 1}}, "b": {"settings": {"arm": 2}}, "c": {"settings": {"arm": 3}}},
            "seeds": [0],
            "max_failures": 1,
            "lease_s": 2.0,
            "budget": {"gpu_seconds": 1e6},
        }
        self.home.mkdir()
        self_signed(self.home)
        (self.home / "data").mkdir()
        (self.home / "data" / "numbers").write_bytes(os.urandom(PIECES))
        (self.home / "secret").write_text("no trial depends on it")
        (self.home / "work.py").write_text(WORK)
        (self.home / "gain.py").write_text("GAIN = 10\n")
        (self.home / "study.toml").write_text(tomli_w.dumps(self.study))
        self.ledger = StudyFolder(self.home / "study.toml", self.study["name"]).ledger

    @contextlib.contextmanager
    def lead(self, *more):
        opened = ["--tls-port", str(self.port), "--certificate", "cert.pem", "--key", "key.pem"]
        command = [*SWARMQ, "run", "study.toml", "--workers", "0", *opened, *more]
        with run(command, self.home) as process:
            wait_until((self.ledger.parent / "endpoint").exists, process)
            yield process

    def invite(self, name):
        where = ["--amqp", f"amqps://127.0.0.1:{self.port}/", "--ca", "cert.pem"]
        command = [*SWARMQ, "invite", "study.toml", name, *where]
        done = subprocess.run(command, cwd=self.home, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def work(self, name, *more):
        folder = self.others / name
        folder.mkdir(parents=True, exist_ok=True)
        return run([*SWARMQ, "worker", "--join", self.invite(name), *more], folder, HOME=str(folder))

    @property
    def trials(self):
        """Trial -> its arm."""
        return {fact.trial.id: fact.trial.arm for fact in self.facts(TrialPlanned)}

    def facts(self, kind):
        return [entry.fact for entry in read_ledger(self.ledger) if isinstance(entry.fact, kind)]


@contextlib.contextmanager
def run(command, folder, **environment):
    log = folder / "output"
    with log.open("ab") as sink:
        own = {name: value for name, value in os.environ.items() if not name.startswith("SWARMQ_")}
        process = subprocess.Popen(command, cwd=folder, env=own | environment, stdout=sink, stderr=sink)
    process.log = log
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition, *processes):
    deadline = time.monotonic() + 240
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, [process.log.read_text() for process in ended]
        assert time.monotonic() < deadline, [process.log.read_text() for process in processes]
        time.sleep(0.05)


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


def test_invited_hosts_run_the_trials_of_a_study_and_one_that_is_killed_is_replaced(hosts):
    with hosts.lead() as leader:
        with hosts.work("gpu2") as first:
            wait_until(lambda: [*hosts.others.glob("gpu2/study-*/files/*/started")], leader, first)
        with hosts.work("gpu3") as second:
            assert second.wait(240) == 0, second.log.read_text()
            assert leader.wait(60) == 0, leader.log.read_text()
    scores = {hosts.trials[fact.trial_id]: fact.metrics["score"] for fact in hosts.facts(TrialResult)}
    assert scores == {"a": PIECES + 10, "b": PIECES + 20}
    assert [fact.kind for fact in hosts.facts(TrialFailed) if fact.kind == "lost"] == ["lost"]
    assert {fact.worker.partition(":")[0] for fact in hosts.facts(TrialStarted)} == {"gpu2", "gpu3"}
    (parked,) = hosts.facts(TrialParked)
    assert "three is too many" in parked.log
    assert not [*hosts.home.glob("studies/*/trials")]
    (root,) = hosts.others.glob("gpu3/study-*/files/*")
    sent = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert sent == {"work.py", "gain.py", "data/numbers"}


def test_an_invited_host_fetches_the_files_of_an_amended_study_and_goes_on(hosts):
    with hosts.lead() as leader, hosts.work("gpu2", "--parallel", "2") as process:
        wait_until(lambda: [*hosts.others.glob("gpu2/study-*/files/*/started")], leader, process)
        leader.terminate()
        leader.wait()
        (hosts.home / "gain.py").write_text("GAIN = 20\n")
        with hosts.lead("--amend", "10 was too little") as second:
            assert process.wait(240) == 0, process.log.read_text()
            assert second.wait(60) == 0, second.log.read_text()
    assert "the study was amended; starting again with its files" in process.log.read_text()
    state = StudyState(read_ledger(hosts.ledger))
    scores = {trial.arm: result.metrics["score"] for trial, result in state.results}
    assert scores == {"a": PIECES + 20, "b": PIECES + 40}
