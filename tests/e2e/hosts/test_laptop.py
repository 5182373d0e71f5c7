"""A laptop without a shared disk defines, starts, watches, changes, stops and resumes a training over HTTP, its agents learn meanwhile, and
the GPU host's daemon is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.hosts.machines import DISK, Machine, Switch, why_not

from support.tiny_model import tiny_model
from support.toy_task import GAIN
from swarmq.learner.checkpoint.discovery import verify
from swarmq.learner.store.batch_log import read_records

pytestmark = [
    pytest.mark.broker,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

LAPTOP = Path(__file__).parents[2] / "support" / "laptop.py"
RUNS = f"{DISK}/runs"
DAEMON = (sys.executable, "-m", "swarmq", "host", "serve", RUNS, "--host")


def test_a_laptop_trains_on_a_host_the_daemon_of_which_is_killed():
    with Switch() as switch, switch.machine("gpu-box") as box, switch.machine("laptop") as laptop:
        box.boot({"daemon": [*DAEMON, box.address]})
        wait_for_starts(box, 1)
        token = box.run([sys.executable, "-m", "swarmq", "host", "token", RUNS, "--role", "operate"]).strip()
        program = [
            "timeout",
            "1500",
            sys.executable,
            str(LAPTOP),
            f"http://{box.address}:7000",
            str(tiny_model()),
            DISK,
        ]
        with ThreadPoolExecutor() as threads:
            steering = threads.submit(laptop.run, ["env", f"SWARMQ_TOKEN={token}", *program])
            while not laptop.path(f"{DISK}/ready").exists():
                if steering.done() or '"state": "failed"' in box.logs():
                    pytest.fail(box.logs())
                time.sleep(0.2)
            os.kill(find_daemon(box.address), signal.SIGKILL)
            wait_for_starts(box, 2)
            laptop.path(f"{DISK}/go").touch()
            lines = steering.result().splitlines()  # some of a log, on a slow machine
        assert not laptop.path(RUNS).exists()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        checkpoint = verify(laptop.path(f"{DISK}/trained"))
        records = list(read_records(laptop.path(f"{DISK}/batches")))
    seen = {one.pop("what"): one for one in said}
    assert seen["refused"] == {"param": "policies.main.model"}
    assert seen["launched"] == {"same": True, "taken": "run", "runs": 1}
    assert seen["fed"] == {"slots": [6, 0]}, "fed once, however often they are sent"
    assert seen["found"] == {"state": "up", "same_process": True}
    assert "learning_rate: 0.001 -> 0.0008" in seen["changed"]["set"]
    assert "the run is paused" in seen["changed"]["paused"]
    assert (seen["changed"]["pace"], seen["changed"]["resumed"]) == ("paused", "running")
    log = "\n".join(seen["stopped"]["log"])
    assert "step 1: reward" in log
    assert "stopped. `swarmq up" in log
    assert seen["resumed"] == {"max_steps": 500, "step": seen["stopped"]["step"]}
    rewards = seen["learned"]["rewards"]
    assert rewards[-1] - rewards[0] >= GAIN
    assert checkpoint.version >= seen["learned"]["step"] > seen["stopped"]["step"] > 0
    trained = [episode for record in records for episode in record.index.trained]
    assert len(trained) == len(set(trained)) <= seen["learned"]["ended"]


def wait_for_starts(box: Machine, times: int) -> None:
    log = box.path(f"{DISK}/log/daemon")
    while not log.exists() or log.read_text().count('"event": "listening"') < times:
        time.sleep(0.2)


def find_daemon(address: str) -> int:
    """Return the process id of the daemon as this machine knows it."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
            if words[:-1] == [*DAEMON, address]:
                return int(entry.name)
    raise AssertionError("the daemon does not run")
