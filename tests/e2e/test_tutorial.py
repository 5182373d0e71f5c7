"""A tutorial learns, run as a user runs it: its commands as processes, and the held-out reward before and after."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.examples.course import Row, row_path

pytestmark = [pytest.mark.broker, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
NAME, STEPS, GAIN = "frozen_lake", 16, 0.1
"""Fewer steps than the tutorial itself makes, and a smaller gain, which is above what chance gives."""


def test_a_tutorial_learns(tmp_path):
    command = [sys.executable, "-m", "benchmarks.examples.course", NAME, "--steps", str(STEPS), "--minutes", "20"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False
    )
    said = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, said
    row = msgspec.json.decode(row_path(tmp_path, NAME, 0).read_bytes(), type=Row)
    assert (row.problem, row.steps, row.before.failed, row.after.failed) == ("", STEPS, 0, 0)
    assert list(row.rewards) == list(range(1, STEPS + 1))
    noise = 2 * (row.before.standard_error**2 + row.after.standard_error**2) ** 0.5
    assert row.gain > max(GAIN, noise), said
