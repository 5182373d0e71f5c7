"""On a host that others use, too, an engine obeys who knows the run's secret, and nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engine import KNOWN, SECRET
from swarmq.engine.server.launch import EngineProcess
from swarmq.weights.push.engine_control import EngineControl

from .conftest import PATIENT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ASK = """
import encodings.idna, json, os, sys, urllib.error, urllib.request

opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # imports what it needs, which nobody may read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
url, headers, body = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].encode() or None
request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
try:
    with opener.open(request, timeout=120) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
"""


def ask(url: str, body: object = None, *, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and text of the answer that another user of this host gets."""
    said = "" if body is None else json.dumps(body)
    argv = [sys.executable, "-I", "-c", ASK, url, json.dumps(headers or {}), said]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    status, text = json.loads(done.stdout)
    return status, text


async def state(engine: EngineProcess) -> tuple[str, bool, list[int]]:
    async with EngineControl(engine.url, secret=engine.secret, timeouts=PATIENT) as control:
        status = await control.status()
        return status.label, status.is_paused, [worker.loads for worker in await control.facts()]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}], ids=["no secret", "another secret"])
async def test_another_user_of_the_host_moves_an_engine_to_nothing(
    engine: EngineProcess, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, headers: dict[str, str]
) -> None:
    zeros = tmp_path_factory.mktemp("zeros") / "0.safetensors"
    save_file(
        {name: torch.zeros_like(tensor) for name, tensor in load_file(tiny_model / "model.safetensors").items()}, zeros
    )
    before = await state(engine)
    for path, body in (
        ("/collective_rpc", {"method": "save_sharded_state", "kwargs": {"path": str(zeros.parent / "written")}}),
        ("/pause?mode=keep", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"path": str(zeros)}}),
        ("/finish_weight_update", {}),
        ("/weight_checker", {"action": "reset"}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
        ("/health", None),
        ("/metrics", None),
        ("/server_info", None),
    ):
        assert ask(engine.url + path, body, headers=headers)[0] == 401, path
    assert await state(engine) == before
    assert not (zeros.parent / "written").exists()


@pytest.mark.parametrize("path", ["/collective_rpc", "/collective_rpc/", "/weight_checker"])
def test_methods_of_workers_are_run_for_nobody(engine: EngineProcess, path: str) -> None:
    body = {"method": "swarmq_facts", "action": "reset"}
    assert ask(engine.url + path, body, headers=dict(KNOWN))[0] in (307, 403)


def test_the_secret_is_in_no_command_line_and_no_log(engine: EngineProcess) -> None:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert SECRET.encode() not in entry.read_bytes(), entry
        except OSError:
            continue
    assert SECRET not in engine.log_path.read_text()


def test_an_engine_listens_for_this_host_alone(engine: EngineProcess) -> None:
    """Its own processes' ports included."""
    told = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    session = os.getsid(engine.pid or 0)
    for line in told.splitlines():
        pids = [int(part.partition(",")[0]) for part in line.split("pid=")[1:]]
        if any(os.getsid(pid) == session for pid in pids if Path(f"/proc/{pid}").exists()):
            assert line.split()[3].rpartition(":")[0] in ("127.0.0.1", "[::1]"), line


async def test_who_knows_the_secret_is_served(engine: EngineProcess) -> None:
    assert ask(f"{engine.url}/health", headers=dict(KNOWN))[0] == 200
    assert len((await state(engine))[2]) == 1
