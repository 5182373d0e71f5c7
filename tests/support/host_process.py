"""`swarmq host serve` as a process that a test kills and starts again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.processes import UpLauncher
from swarmq.runtime.processes import is_alive


class HostProcess:
    def __init__(self, folder: Path) -> None:
        """`folder`: where the runs are."""
        self.folder = folder
        self.url = ""
        self._log = folder.with_name(f"{folder.name}.log")

    def start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        begins_at = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "swarmq", "host", "serve", str(self.folder), "--port", port]
            environment = {name: value for name, value in os.environ.items() if name != "SWARMQ_AMQP_URL"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while not (said := self._said(begins_at, "listening")):
            assert self.process.poll() is None, self._log.read_text()
        self.url = said[0]["url"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Stop the daemon, and then the runs that it left up."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        launcher = UpLauncher(HostFolder(self.folder))
        for path in (self.folder / ".host" / "runs").glob("*.json"):
            while process := launcher.find(path.stem):
                process.send(signal.SIGTERM)
                while is_alive(process.pid):
                    time.sleep(0.1)
        assert status == 0, self._log.read_text()

    def token(self, role: str) -> str:
        command = [sys.executable, "-m", "swarmq", "host", "token", str(self.folder), "--role", role]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def up_pid(self, run: str) -> int:
        """Return the process id of a run's `swarmq up`."""
        return int((self.folder / run / "up.lock").read_text())

    def _said(self, begins_at: int, event: str) -> list[dict[str, Any]]:
        lines = self._log.read_bytes()[begins_at:].splitlines(keepends=True)
        said = [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"\n")]
        return [line for line in said if line["event"] == event]
