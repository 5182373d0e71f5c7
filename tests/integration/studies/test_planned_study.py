"""A study whose planner proposes a change of code that a person approves while the leader runs, from the file to the report: real broker,
leader, worker and trials."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from support.chat_server import serve_chat
from support.studies import FIRST
from swarmq.studies.ledger import StudyFolder, read_ledger
from swarmq.studies.state import StudyState

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

WORK = """\
from gain import GAIN

def trial(attempt):
    return {"score": GAIN * attempt.settings["arm"] + attempt.seed / 10}
"""
ANSWERS = [
    "I need to think.",
    {
        "proposals": [
            {"name": "more-gain", "settings": {"arm": 2}, "edits": [{"file": "gain.py", "old": "1", "new": "5"}]}
        ]
    },
    {"proposals": [{"name": "bad", "edits": [{"file": "work.py", "old": "10", "new": "1"}]}], "notes": "done"},
]


def test_a_planner_adds_an_arm_of_changed_code(tmp_path, amqp_url):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "gain.py").write_text("GAIN = 1\n")
    answers = iter(ANSWERS)

    def answer(_):
        said = next(answers, {"proposals": []})
        return said if isinstance(said, str) else json.dumps(said)

    with serve_chat(answer) as server:
        planner = {"kind": "endpoint", "model": "m", "base_url": server.url, "max_arms": 2, "files": ["gain.py"]}
        planner["approval"] = "arm"
        study = FIRST | {"name": f"planned-{os.getpid()}", "planner": planner, "seeds": [0, 1]}
        study["trial"] = FIRST["trial"] | {"code": ["gain.py"]}
        (tmp_path / "study.toml").write_text(tomli_w.dumps(study))
        command = [sys.executable, "-m", "swarmq", "study"]
        ledger = StudyFolder(tmp_path / "study.toml", study["name"]).ledger
        leader = subprocess.Popen([*command, "run", "study.toml", "--amqp", amqp_url], cwd=tmp_path)
        try:
            while "more-gain" not in StudyState(read_ledger(ledger)).waiting:
                assert leader.poll() is None
                time.sleep(0.1)
            approve = [*command, "approve", "study.toml", "more-gain", "--by", "ada", "--amqp", amqp_url]
            subprocess.run(approve, cwd=tmp_path, check=True)
            assert leader.wait(240) == 0
        finally:
            leader.kill()
            leader.wait()
    entries = read_ledger(ledger)
    state = StudyState(entries)
    assert state.stopped.kind == "complete"
    scores = {(one.trial.arm, one.trial.seed): one.result.metrics["score"] for one in state.trials.values()}
    assert scores == {
        ("a", 0): 1,
        ("a", 1): 1.1,
        ("b", 0): 2,
        ("b", 1): 2.1,
        ("more-gain", 0): 10,
        ("more-gain", 1): 10.1,
    }
    assert (tmp_path / "gain.py").read_text() == "GAIN = 1\n"
    assert (state.proposed["more-gain"].decision, state.proposed["more-gain"].by) == ("accepted", "ada")
    assert "'work.py' may not be changed" in state.proposed["bad"].reason
    made = subprocess.run([*command, "report", "study.toml"], cwd=tmp_path, capture_output=True, text=True, check=True)
    report = Path(made.stdout.split()[0]).read_text()
    assert "more-gain: undecided" in report, "two seeds that differ by the same amount prove nothing"
