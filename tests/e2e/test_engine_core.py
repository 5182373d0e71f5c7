"""A run whose engine loses its core, which is what a system short of memory kills, goes on by itself and says what happened."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from openai import OpenAI

from swarmq import SwarmClient
from swarmq.runtime.processes import find_children

from .test_up import Up, last_step, wait_for_step

pytestmark = [pytest.mark.broker, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def attempt(ep):
    """With the retries that the library has by itself."""
    with OpenAI(base_url=ep.base_url, api_key=ep.api_key) as client:
        answer = client.chat.completions.create(model=ep.model, messages=[{"role": "user", "content": ep.task.id}])
    return float(len(answer.choices[0].message.content or "") % 2)


class Client(threading.Thread):
    """Attempts tasks until it is told to stop."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self.going, self.given_up, self.failed = folder, True, 0, 0

    def run(self) -> None:
        number = 0
        with SwarmClient(self._folder) as client:
            while self.going:
                tasks = [{"id": f"{number}-{i}"} for i in range(16)]
                done = client.run_episodes_until_all_complete(tasks, attempt, concurrency=8, progress=False)
                number, self.given_up, self.failed = (
                    number + 1,
                    self.given_up + done.given_up,
                    self.failed + done.failed,
                )


def core(up: Up) -> int:
    """The engine's process that samples."""
    parts = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    [pid] = [core for part in parts for core in find_children(int(part), "VLLM::EngineCore")]
    return pid


def steps_at(up: Up) -> list[float]:
    """When each step ended, in Unix seconds."""
    events = [json.loads(line) for line in up.folder.events.read_text().splitlines()]
    return [event["at"] for event in events if event["name"] == "step"]


def test_a_run_whose_engine_core_is_killed_takes_its_next_step_soon(tmp_path):
    up = Up(tmp_path)
    up.start()
    client = Client(up.folder.path)
    client.start()
    try:
        wait_for_step(up, 2)
        before, killed_at = last_step(up.folder), time.time()
        os.kill(core(up), signal.SIGKILL)
        wait_for_step(up, before + 10)  # more than the queues hold: the engine that came back has sampled it
    finally:
        client.going = False
        client.join(600)
        said = up.stop()
    ends = [killed_at, *(at for at in steps_at(up) if at > killed_at)]
    stall_s = max(b - a for a, b in itertools.pairwise(ends))
    sys.stdout.write(f"longest time without a step: {stall_s:.0f} s\n")
    assert stall_s < 240.0
    assert "engine main.0 lost its VLLM::EngineCore" in said
    assert said.count("restarting") == 1
    assert client.given_up == client.failed == 0, "agents' own retries were enough"
    told = up.folder.events.read_text()
    assert "no engine answers (" in told
    assert "an engine answers again" in told
