"""A laptop without a shared disk defines, starts, watches, changes, stops and resumes a run over HTTP, and the host's daemon is killed
meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_model import tiny_model

pytestmark = [pytest.mark.broker, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LAPTOP = Path(__file__).parents[1] / "support" / "laptop.py"


class Daemon:
    """`swarmq host serve`, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self._log = folder.with_name("daemon.log")

    def start(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "swarmq", "host", "serve", str(self.folder), "--port", str(port)]
        begins_at = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        while not (said := [line for line in self.read_log(begins_at) if line["event"] == "listening"]):
            assert self.process.poll() is None, self._log.read_text()
        self.url = said[0]["url"]

    def read_log(self, begins_at: int = 0):
        lines = self._log.read_bytes()[begins_at:].splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"\n")]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def token(self, role: str) -> str:
        command = [sys.executable, "-m", "swarmq", "host", "token", str(self.folder), "--role", role]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_laptop_steers_a_run_while_the_host_s_daemon_is_killed(tmp_path):
    daemon = Daemon(tmp_path / "runs")
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
                daemon.start(int(daemon.url.rpartition(":")[2]))
                laptop.stdin.write("\n")
                laptop.stdin.flush()
        assert laptop.wait() == 0
    finally:
        laptop.kill()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
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
