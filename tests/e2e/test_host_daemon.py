"""A laptop without a shared disk defines, starts, watches, changes, stops and resumes a run over HTTP, and the host's daemon is killed
meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.host_process import HostProcess
from support.tiny_model import tiny_model

pytestmark = [pytest.mark.broker, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LAPTOP = Path(__file__).parents[1] / "support" / "laptop.py"


def test_a_laptop_steers_a_run_while_the_host_s_daemon_is_killed(tmp_path):
    daemon = HostProcess(tmp_path / "runs")
    daemon.start()
    environment = os.environ | {"SWARMQ_TOKEN": daemon.token("operate")}
    laptop = subprocess.Popen(
        [sys.executable, str(LAPTOP), daemon.url, str(tiny_model())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    seen = {}
    try:
        for line in laptop.stdout:
            said = json.loads(line)
            seen[said.pop("what")] = said
            if "ready" in line:
                daemon.kill()
                daemon.start()
                laptop.stdin.write("\n")
                laptop.stdin.flush()
        assert laptop.wait() == 0
    finally:
        laptop.kill()
        daemon.end()
    assert seen["refused"] == {"param": "policies.main.model"}
    assert seen["launched"] == {"same": True, "taken": "run", "runs": 1}
    assert "learning_rate: 1e-06 -> 2e-06" in seen["changed"]["set"]
    assert "the run is paused" in seen["changed"]["paused"]
    assert seen["changed"]["resumed"] == "running"
    assert seen["found"] == {"same_process": True}
    assert seen["stopped"]["step"] > 0
    assert {"model.safetensors", "config.json"} <= set(seen["downloaded"]["files"])
    assert seen["done"]["step"] == seen["done"]["more"]
    assert seen["logs"] == {"ended": True}
