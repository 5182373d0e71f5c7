"""A host's daemon under many jobs and kills: is every run carried out once, and to its end?

The daemon, its checks, its requests over HTTP and the processes of its runs are real. What is scripted is the run itself: in place of
`swarmq up`, a program takes the run folder's lock, makes steps of 0.1 s, each of which is a line of `events.jsonl`, continues after the
last one when it is started again, and ends after `train.max_steps`. Two processes of one run would be seen: the second finds the lock
taken, and steps would come twice.

While jobs are launched, daemons and runs are killed with SIGKILL at random times, a daemon in the middle of launches too. A run is lost if it
is not done in the end, or if a step is missing or was made twice. Example:

    python -m benchmarks.hosts.daemon --jobs 100 --kills 100
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from support.tiny_model import tiny_model
from swarmq import HostClient, launch
from swarmq.errors import HostError
from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.processes import UpLauncher
from swarmq.remote.records import FINAL

RUN = """
import fcntl, json, os, signal, sys, time, tomllib
from pathlib import Path

folder = Path(sys.argv[1]).parent
lock = (folder / "up.lock").open("a+")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    (folder / "twice").touch()
    sys.exit("swarmq: two processes")
job = (folder / "job.toml").read_text()
(folder / "resolved.toml").write_text(job)
(folder / "invite").write_text("")
last = tomllib.loads(job)["policies"]["main"]["train"]["max_steps"]
events = folder / "events.jsonl"
step = len([line for line in events.read_bytes().splitlines(True) if line.endswith(b"\\n")]) if events.exists() else 0
while step < last:
    time.sleep(0.1)
    step += 1
    fields = {"version": step, "reward": 0.5}
    event = {"run": folder.name, "source": "learner.main", "name": "step", "at": time.time(), "fields": fields}
    with events.open("ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\\n")
"""
DAEMON = """
import sys
from pathlib import Path
from swarmq.host_daemon.main import serve

serve(
    Path(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), tls=None, most_running=int(sys.argv[3]), most_queued=10_000,
    command=(sys.executable, "-c", sys.argv[4]),
)
"""
PATIENCE_S = 300.0
"""Seconds for which a client waits for a daemon that is started again, on a busy machine."""
MOST_KILLS_OF_A_RUN = 3
"""Fewer than those after which a daemon gives a run up."""


class Daemon:
    """A daemon that is started again whenever it is killed."""

    def __init__(self, folder: Path, most_running: int) -> None:
        self.folder = folder
        self.url = ""
        self._most_running = most_running
        self._log = folder.with_name("daemon.log")
        self.start()

    def start(self) -> None:
        port, begins_at = self.url.rpartition(":")[2] or "0", self._log.stat().st_size if self._log.exists() else 0
        argv = [sys.executable, "-c", DAEMON, str(self.folder), port, str(self._most_running), RUN]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        while not (urls := [one["url"] for one in self._said(begins_at) if one["event"] == "listening"]):
            if self.process.poll() is not None:
                raise RuntimeError(self._log.read_text()[-4000:])
            time.sleep(0.05)
        self.url = urls[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def token(self) -> str:
        argv = [sys.executable, "-m", "swarmq", "host", "token", str(self.folder), "--role", "admin"]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    def _said(self, begins_at: int) -> list[dict[str, Any]]:
        lines = self._log.read_bytes()[begins_at:].splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"\n")]


class Launcher(threading.Thread):
    """Launches jobs one after the other, and repeats every launch once."""

    def __init__(self, client: HostClient, model: Path, names: list[str], steps: int) -> None:
        super().__init__(daemon=True)
        self._client, self._model, self._names, self._steps = client, model, names, steps
        self.refused: list[str] = []

    def run(self) -> None:
        for name in self._names:
            train = {"max_steps": self._steps}
            job = {"run": name, "policies": {"main": {"model": str(self._model), "train": train}}}
            try:
                for _ in range(2):
                    launch(job, host=self._client, request_id=f"launch-{name}")
            except HostError as error:
                self.refused.append(f"{name}: {error}")


def kill_at_random(
    daemon: Daemon, client: HostClient, rng: random.Random, kills: int, names: list[str]
) -> dict[str, int]:
    """Kill daemons and runs `kills` times, and return how often each."""
    killed, of_run = {"daemon": 0, "run": 0}, dict.fromkeys(names, 0)
    find = UpLauncher(HostFolder(daemon.folder)).find
    while sum(killed.values()) < kills:
        time.sleep(rng.uniform(0.0, 0.5))
        if killed["daemon"] <= killed["run"]:
            daemon.kill()
            killed["daemon"] += 1
            time.sleep(rng.choice((0.0, 0.0, 1.0)))
            daemon.start()
            continue
        victims = [name for name in names if of_run[name] < MOST_KILLS_OF_A_RUN and find(name)]
        if not victims:
            if len(client.runs()) == len(names) and all(view.state in FINAL for view in client.runs()):
                break
            continue
        victim = rng.choice(victims)
        if process := find(victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            of_run[victim] += 1
            killed["run"] += 1
    return killed


def find_lost(client: HostClient, folder: Path, names: list[str], steps: int) -> dict[str, str]:
    """Return run -> what is wrong with it."""
    views = {view.run: view for view in client.runs()}
    lost = {}
    for name in names:
        events = folder / name / "events.jsonl"
        made = (
            [json.loads(line)["fields"]["version"] for line in events.read_bytes().splitlines()]
            if events.exists()
            else []
        )
        if name not in views:
            lost[name] = "not known"
        elif views[name].state != "done":
            lost[name] = f"{views[name].state}: {views[name].detail}"
        elif made != list(range(1, steps + 1)):
            lost[name] = f"steps {made}"
        elif (folder / name / "twice").exists():
            lost[name] = "two processes at once"
    return lost


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs, half of them of daemons")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--running", type=int, default=4, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    names = [f"run-{number}" for number in range(given.jobs)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swarmq-host-") as scratch:
        daemon = Daemon(Path(scratch) / "runs", given.running)
        try:
            client = HostClient(daemon.url, token=daemon.token(), patience_s=PATIENCE_S)
            launcher = Launcher(client, tiny_model(), names, given.steps)
            launcher.start()
            killed = kill_at_random(daemon, client, random.Random(given.seed), given.kills, names)
            launcher.join()
            while any(view.state not in FINAL for view in client.runs()):
                time.sleep(0.2)
            lost = find_lost(client, daemon.folder, names, given.steps)
            restarts = sum(view.restarts for view in client.runs())
        finally:
            daemon.kill()
    figures = {
        "jobs": given.jobs,
        "kills": sum(killed.values()),
        "runs_lost": len(lost),
        "launches_refused": len(launcher.refused),
    }
    rows = [("daemon", killed["daemon"]), ("run", killed["run"])]
    print(report.table(("killed", "times"), rows))
    print(report.table(("jobs", "lost", "started again"), [(given.jobs, len(lost), restarts)]))
    for name, why in lost.items():
        print(f"{name}: {why}")
    detail = {
        **{name: value for name, value in vars(given).items() if name != "out"},
        "killed": killed,
        "restarts": restarts,
        "lost": lost,
        "refused": launcher.refused,
        "seconds": round(time.monotonic() - began, 1),
        "scripted": "the runs: a program makes steps in place of swarmq up; daemon, checks, requests and processes are real",
    }
    print(f"saved to {report.save('host', figures, detail=detail, out=given.out)}")


if __name__ == "__main__":
    main()
