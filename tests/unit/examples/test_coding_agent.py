"""Each folder of the coding agent's example has a bug that its tests find, and its task names it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarmq.black_box.agent import CommandOptions, read_task
from swarmq.config import SwarmJob

EXAMPLE = Path(__file__).parents[3] / "examples/coding_agent"
TASKS = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
OPTIONS = CommandOptions(argv=("agent",), test="true", folder=EXAMPLE / "repositories")


@pytest.mark.parametrize("task", TASKS, ids=[task["id"] for task in TASKS])
def test_one_of_two_tests_fails_until_the_bug_is_mended(task):
    prompt, folder, _ = read_task(task, OPTIONS)
    assert f"{task['id']}.py" in prompt
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=prepend",
        "-c",
        "/dev/null",
    ]
    done = subprocess.run(
        [*command, "--rootdir", ".", "tests"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in done.stdout or "2 failed" in done.stdout, done.stdout


def test_every_folder_has_a_task():
    assert {path.name for path in (EXAMPLE / "repositories").iterdir()} == {task["folder"] for task in TASKS}


def test_the_job_is_valid():
    assert SwarmJob.load(EXAMPLE / "job_h200.toml").policies["main"].engine.max_model_len == 65_536
