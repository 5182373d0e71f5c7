"""docker-compose.yml for real: images are built, everything comes up, trains, and loses nothing when services die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest
import tomli_w

from support.docker import ROOT, make_base_images, private_docker, why_not
from support.figures import write_figures
from support.tiny_model import tiny_model
from support.toy_task import Toy, toy_settings
from swarmq import SwarmClient
from swarmq.collector.ledger import Fate, read_fates
from swarmq.config import RunFolder
from swarmq.demo.accounting import WAITING_STATES, settle
from swarmq.learner.store.batch_log import read_records
from swarmq.runtime.processes import find_free_port

pytestmark = [
    pytest.mark.broker,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

OVERRIDE = """
services:
  proxy:
    build:
      args: { TORCH_INDEX: "file:///wheels" }
      additional_contexts: { wheels: "%(index)s" }
      secrets: [ca]
secrets: { ca: { file: /etc/ssl/certs/ca-certificates.crt } }
"""
"""What a host adds that reaches no index of PyTorch, and other servers only through an authority of its own."""
SERVICES = {"rabbitmq", "engine", "proxy", "collector", "learner", "recorder"}
WAIT_S = 900.0


def index_of_torch() -> Path:
    """A folder that pip can take for an index, with the CPU build of torch from wherever pip looks."""
    [version] = re.findall(r"^torch==(.*)", (ROOT / "requirements/tested.txt").read_text(), re.MULTILINE)
    folder = ROOT / ".cache" / "docker" / f"torch-{version}"
    if not (folder / "torch/index.html").exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "torch")]
        subprocess.run([*pip, f"torch=={version}+cpu"], check=True)
        [wheel] = (folder / "torch").glob("*.whl")
        (folder / "torch/index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return folder


class Compose:
    """`docker compose` with the project's file, on a docker daemon of the test's own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._environment, self._folder = environment, folder
        self.ports = {name: find_free_port() for name in ("AMQP", "UI", "PROXY")}
        shutil.copytree(tiny_model(), folder / "models/tiny")
        for path in (folder / "models").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "job.toml").write_text(tomli_w.dumps(toy_settings("/models/tiny")))
        (folder / "override.yml").write_text(OVERRIDE % {"index": index_of_torch()})
        lines = ["COMPOSE_PROFILES=cpu", "SWARMQ_BROKER_PASSWORD=of-a-test"]
        lines += [f"SWARMQ_JOB={folder}/job.toml", f"SWARMQ_MODELS={folder}/models"]
        lines += [f"SWARMQ_{name}_PORT={port}" for name, port in self.ports.items()]
        (folder / "env").write_text("\n".join(lines))
        files = (ROOT / "docker-compose.yml", folder / "override.yml")
        self._options = ["--project-name=toy", f"--env-file={folder}/env", *(f"--file={file}" for file in files)]

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            ["docker", "compose", *self._options, *words],
            env=self._environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.returncode, f"{' '.join(words)}:\n{done.stderr[-4000:]}"
        return done.stdout

    def swarmq(self, *words: str) -> str:
        return self("run", "--rm", "-T", "swarmq", *words)

    def state(self, service: str) -> dict[str, Any]:
        return self._inspect(self("ps", "--all", "--quiet", service).strip())["State"]

    def users(self, service: str) -> set[str]:
        """The users of all processes of a service."""
        shown = subprocess.run(
            ["docker", "top", self("ps", "--quiet", service).strip(), "-o", "user:20,pid"],
            env=self._environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        return {line.split()[0] for line in shown.splitlines()[1:]}

    def volume(self, name: str) -> Path:
        return Path(self._ask("volume", "inspect", "--format={{.Mountpoint}}", f"toy_{name}").strip())

    def _inspect(self, container: str) -> dict[str, Any]:
        return msgspec.json.decode(self._ask("inspect", container))[0]

    def _ask(self, *words: str) -> str:
        return subprocess.run(
            ["docker", *words], env=self._environment, capture_output=True, text=True, check=True
        ).stdout


def last_step(folder: RunFolder) -> int:
    return max((record.index.version for record in read_records(folder.batch_log("main"))), default=0)


def wait(what: str, compose: Compose, fact: Any) -> None:
    until = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < until, (
            f"{what} did not come\n{compose('ps', '--all')}\n{compose('logs', '--tail=30')}"
        )
        time.sleep(0.2)


def crash(service: str, compose: Compose) -> None:
    """Kill a service's first process, as the kernel would when memory runs out; docker starts the service again."""
    before = compose.state(service)
    os.kill(before["Pid"], signal.SIGKILL)

    def is_back() -> bool:
        now = compose.state(service)
        return now["Running"] and now["StartedAt"] != before["StartedAt"]

    wait(f"a new {service}", compose, is_back)


def test_compose_builds_comes_up_trains_and_loses_nothing_when_services_die(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(dir="/var/tmp"))  # with room for images, and short enough for a socket
    try:
        with private_docker(home) as environment:
            make_base_images(environment)
            compose = Compose(tmp_path, environment)
            try:
                check(compose, tmp_path)
            finally:
                compose("down", "--volumes", "--timeout=0")
    finally:
        shutil.rmtree(home)


def check(compose: Compose, folder: Path) -> None:
    compose("up", "--detach", "--wait", f"--wait-timeout={WAIT_S:.0f}")
    assert set(compose("ps", "--services").split()) == SERVICES
    assert {name: compose.users(name) for name in SERVICES if "root" in compose.users(name)} == {}
    with urlopen(Request(f"http://127.0.0.1:{compose.ports['UI']}/")) as page:
        assert "RabbitMQ Management" in page.read().decode()

    invite = compose.swarmq("invite", "/etc/swarmq/job.toml").strip().removeprefix("export SWARMQ_INVITE=")
    run, toy = RunFolder(compose.volume("runs") / "toy"), Toy()
    with SwarmClient(invite, spool=folder / "spool") as client:
        toy.play(client)
        wait("a first step", compose, lambda: last_step(run) >= 1)
        crash("engine", compose)  # it starts with the model's first weights, and needs the learner's
        crash("learner", compose)
        crash("collector", compose)
        compose("restart", "rabbitmq", "proxy")
        toy.learn(client)

    def all_collected() -> bool:
        return set(toy.ended) <= {name for name, fate in fates(run).items() if fate.state != "open"}

    wait("every end", compose, all_collected)
    known = fates(run)
    account = settle(
        toy.ended,
        [episode for record in read_records(run.batch_log("main")) for episode in record.index.trained],
        {name: fate.reason for name, fate in known.items() if fate.state == "dropped"},
        [name for name, fate in known.items() if fate.state in WAITING_STATES],
    )
    assert (account.lost, account.twice) == ((), ())
    served = compose.swarmq("engine", "list", "/runs/toy")
    assert "http://engine:8100" in served
    assert "serves" in served
    write_figures(compose_reward_before=toy.rewards[0], compose_reward_after=toy.rewards[-1])


def fates(run: RunFolder) -> dict[str, Fate]:
    return read_fates(run.inbox)
