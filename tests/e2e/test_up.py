"""`swarmq up` on a real model: everything starts, trains, stops without a trace, and goes on where it was."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest
from openai import OpenAI

from support.small_job import small_job
from swarmq import SwarmClient, keys
from swarmq.broker import topology
from swarmq.collector.ledger import read_fates
from swarmq.config import RunFolder, SwarmJob
from swarmq.learner.store.batch_log import read_records
from swarmq.up import Endpoints

pytestmark = [pytest.mark.broker, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


class Up:
    """A `swarmq up` process of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder / "runs" / "e2e")
        self._job = folder / "job.toml"
        self._log = folder / "up.log"
        settings = {"folder": str(folder / "runs"), "proxy": {"count": 2}, "collector": {"processes": 2}}
        self._job.write_text(small_job("e2e", train={"checkpoint_every": 2}, **settings))

    def start(self) -> None:
        command = [sys.executable, "-m", "swarmq", "up", str(self._job)]
        with self._log.open("ab") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment())
        while b"Ctrl-C stops everything" not in self._log.read_bytes():
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.2)

    def stop(self) -> str:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(900) == 0, self._log.read_text()
        text = self._log.read_text()
        self._log.write_bytes(b"")
        return text

    def pids(self) -> set[int]:
        """Every living process whose command line or parent belongs to this run."""
        mine = str(self.folder.path).encode()
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mine in (entry / "cmdline").read_bytes() or mine in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
                except OSError:
                    continue
        return found

    def swarmq(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "swarmq", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "SWARMQ_AMQP_URL"}


def attempt(ep):
    messages = [{"role": "user", "content": f"task {ep.task.id}"}]
    with OpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=8) as client:
        for _ in range(2):
            answer = client.chat.completions.create(model=ep.model, messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": answer or ""}, {"role": "user", "content": "again"}]
    return random.random()


def last_step(folder: RunFolder) -> int:
    return max((record.index.version for record in read_records(folder.batch_log("main"))), default=0)


def check_metrics(endpoints: Endpoints, folder: RunFolder) -> None:
    """Every process serves its metrics at the address that `swarmq up` writes for people and for Prometheus."""
    steps = re.compile(r'^swarmq_learner_steps_total\{policy="main"\} [1-9]', re.MULTILINE)
    while not steps.search(read_page(endpoints.metrics["learner.main"], folder)):
        time.sleep(0.2)  # the batch is in the log before it is trained
    pages = {name: read_page(url, folder) for name, url in endpoints.metrics.items()}
    assert sorted(pages) == ["collector", "learner.main", "proxy.0", "proxy.1"]
    assert 'swarmq_collector_weight_version{policy="main"} ' in pages["collector"]
    assert "swarmq_calls_total" in pages["proxy.1"]
    targets = msgspec.json.decode(folder.prometheus_targets.read_bytes())
    assert {one["labels"]["process"] for one in targets} == pages.keys()


def check_recording(folder: RunFolder) -> None:
    """The run folder alone tells what the run does."""
    while not (folder.samples.exists() and (board := read_board(folder))["policies"].get("main", {}).get("step")):
        time.sleep(0.2)
    assert board["recorder"]["is_recording"]
    assert board["broker"]["state"] == "ok"
    assert {"collector", "learner.main", "proxy.0", "proxy.1"} <= board["parts"].keys()
    [engine] = board["engines"].values()
    assert engine["state"] == "up"
    assert engine["kv"] is not None
    inbox = board["queue_details"]["swarmq.e2e.in"]
    assert inbox["oldest_s"] is not None, "RabbitMQ's management API tells it"
    assert board["queue_details"][topology.turns("e2e", 1)]["consumers"] == 1, "the collector's second process"
    sample = msgspec.json.decode(folder.samples.read_bytes().splitlines()[-1])
    assert sample["counts"]["begun"] > 0


def read_board(folder: RunFolder) -> dict[str, Any]:
    return msgspec.json.decode(folder.board.read_bytes())


def read_page(url: str, folder: RunFolder) -> str:
    with urlopen(Request(url, headers={"authorization": f"Bearer {read_token(folder)}"})) as response:
        return response.read().decode()


def read_token(folder: RunFolder) -> str:
    operator = keys.Operator(run="e2e", name="test", roles=("read",), expires_at=time.time() + 3600)
    return keys.mint_operator(keys.derive_operator_secret(keys.load_root(folder.root_secret), "test"), operator)


def proxy_answers(base_url: str, folder: RunFolder) -> bool:
    """Whether a proxy of the run knows a token of the run, and has answered calls."""
    headers = {"authorization": f"Bearer {read_token(folder)}"}
    with urlopen(Request(f"{base_url}/control/status", headers=headers)) as response:
        return msgspec.json.decode(response.read())["counts"]["calls"] > 0


def train(up: Up, tasks: int) -> int:
    with SwarmClient(up.folder.path) as client:
        names = [{"id": f"{time.time_ns()}-{i}"} for i in range(tasks)]
        summary = client.run_episodes_until_all_complete(names, attempt, concurrency=8, progress=False)
    assert summary.given_up == 0
    return summary.finished


def wait_for_step(up: Up, version: int) -> None:
    while last_step(up.folder) < version:  # the test's own deadline ends this
        assert up.process.poll() is None
        time.sleep(0.2)


def wait_until_collected(up: Up, episodes: int) -> None:
    """The collector has the ends of all these; they were confirmed by the broker."""
    while sum(fate.state != "open" for fate in read_fates(up.folder.inbox).values()) < episodes:
        assert up.process.poll() is None
        time.sleep(0.2)


def left_in_the_end(up: Up) -> set[int]:
    """Processes that outlive the run. Those that were killed a moment ago may still be on their way."""
    until = time.monotonic() + 120
    while (left := up.pids()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def test_a_run_comes_up_trains_stops_without_a_trace_and_goes_on_where_it_was(tmp_path):
    up = Up(tmp_path)
    up.start()
    try:
        finished = train(up, tasks=4)
        wait_for_step(up, 1)
        second = up.swarmq("up", str(tmp_path / "job.toml"))
        assert second.returncode == 1
        assert f"already up, started by process {up.process.pid}" in second.stderr
        endpoints = msgspec.json.decode(up.folder.endpoints.read_bytes(), type=Endpoints)
        assert len(endpoints.proxies) == len({urlsplit(url).port for url in endpoints.proxies}) == 2
        assert all(proxy_answers(url, up.folder) for url in endpoints.proxies)
        assert up.folder.endpoints.stat().st_mode & 0o077 == 0
        check_metrics(endpoints, up.folder)
        check_recording(up.folder)
    finally:
        said = up.stop()
    assert left_in_the_end(up) == set()
    first_part = last_step(up.folder)
    assert said.endswith(f"stopped. `swarmq up {up.folder.job}` continues after step {first_part}\n")
    assert re.search(r"^ *\d+\.\d s  step 1: reward ", said, re.MULTILINE)
    assert re.findall(r"^(?! *\d+\.\d s  ).+", said, re.MULTILINE) == [], "lines of one style"
    [(tokens, reason)] = re.findall(r"context of main: ([\d,]+) tokens for prompt and answer, (.*)", said)
    assert "without a GPU" in reason or "host memory" in reason
    assert SwarmJob.load(up.folder.resolved).policies["main"].engine.max_model_len == int(tokens.replace(",", ""))
    assert SwarmJob.load(up.folder.job).policies["main"].engine.max_model_len is None
    assert endpoints.management_password
    for secret in (endpoints.management_password, up.folder.invite.read_text().strip(), endpoints.amqp_url):
        assert secret not in said
    listing = up.swarmq("inspect", str(up.folder.path))
    assert listing.returncode == 0, listing.stderr

    up.start()
    try:
        again = msgspec.json.decode(up.folder.endpoints.read_bytes(), type=Endpoints)
        assert (again.amqp_url, again.proxies) == (endpoints.amqp_url, endpoints.proxies), (
            "clients must find the run again"
        )
        finished += train(up, tasks=4)
        wait_for_step(up, first_part + 1)
        wait_until_collected(up, finished)
        while "learner.main" not in (shown := up.swarmq("status", str(up.folder.path))).stdout:
            assert shown.returncode == 0, shown.stderr  # busy parts may say nothing for as long as it looks
    finally:
        up.stop()
    trained = [episode for record in read_records(up.folder.batch_log("main")) for episode in record.index.trained]
    assert len(trained) == len(set(trained))
    states = [fate.state for fate in read_fates(up.folder.inbox).values()]
    assert len(states) == finished
    assert states.count("trained") + states.count("published") + states.count("waiting") == finished
