"""A server that we start serves, comes back on its port, and never outlives us."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from support.engine import KNOWN, SECRET, tiny_policy
from swarmq.engine.server.launch import EngineProcess
from swarmq.errors import EngineError
from swarmq.runtime.processes import find_children, reserve_port
from swarmq.weights.push.engine_control import EngineControl

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OWNER = """
import asyncio, sys
from pathlib import Path
from support.engine import SECRET, tiny_policy
from swarmq.engine.server.launch import EngineProcess

async def main(model, port, log):
    async with EngineProcess(tiny_policy(Path(model)), port=int(port), log_path=Path(log), secret=SECRET) as engine:
        print("serving", flush=True)
        await engine.wait()

asyncio.run(main(*sys.argv[1:]))
"""


def family(session_id: int) -> list[int]:
    """The processes of a session that still run."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == session_id and state != "Z":
            members.append(int(stat.parent.name))
    return members


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def where_torch_is(pid: int) -> set[str]:
    """The addresses of torch's library in a process, which differ in each process that loads it by itself."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if line.endswith("/libtorch_cpu.so") and "r-xp" in line}


def listens(pid: int, url: str) -> bool:
    """Whether a process holds the listening socket of an address."""
    port = f":{int(url.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "0A"}
    assert sockets
    return bool(sockets & {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()})


async def until_gone(session_id: int) -> None:
    async with asyncio.timeout(300):
        while family(session_id):  # noqa: ASYNC110 - they are not our children, nothing tells of their end
            await asyncio.sleep(0.05)


async def test_a_server_killed_hard_takes_its_core_along_and_comes_back_on_its_port(tiny_model, tmp_path):
    stages: list[str] = []
    engine = EngineProcess(
        tiny_policy(tiny_model), port=reserve_port(), log_path=tmp_path / "engine.log", progress=stages.append
    )
    async with engine:
        assert stages[0] == "starting vLLM"
        assert "loading the weights" in stages
        first, url = engine.pid, engine.url
        assert len(family(first)) > 1
        [core] = find_children(first, "VLLM::EngineCore")
        assert where_torch_is(core) == where_torch_is(first), "forked, so that it imports nothing again"
        assert [pid for pid in family(first) if listens(pid, url)] == [first], "a port that the server closes is closed"
        waiting = asyncio.create_task(engine.wait())
        os.kill(first, signal.SIGKILL)
        assert await waiting == -signal.SIGKILL
        await until_gone(first)
        await engine.restart()
        assert engine.url == url
        assert engine.pid != first
        async with EngineControl(url, secret=engine.secret) as control:
            assert (await control.status()).version is None
    assert engine.pid is not None
    await until_gone(engine.pid)


async def test_a_server_that_loses_its_core_is_ended_with_a_call_in_flight_and_says_why(tiny_model, tmp_path):
    engine = EngineProcess(
        tiny_policy(tiny_model), port=reserve_port(), log_path=tmp_path / "engine.log", secret=SECRET
    )
    async with engine, aiohttp.ClientSession(headers=KNOWN) as http:
        call = await answering(http, int(engine.url.rpartition(":")[2]))
        waiting = asyncio.create_task(engine.wait())
        [core] = find_children(engine.pid, "VLLM::EngineCore")
        os.kill(core, signal.SIGKILL)
        assert await waiting != 0
        assert engine.kill_reason.startswith("lost its VLLM::EngineCore")
        call.close()
        await until_gone(engine.pid)


async def answering(http: aiohttp.ClientSession, port: int) -> aiohttp.ClientResponse:
    """A call of which the first token has come, and many are to come."""
    body = {"prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True}
    response = await http.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
    assert response.status == 200
    await response.content.readline()
    return response


async def test_nothing_is_left_when_the_owner_is_killed_hard_with_a_call_in_flight(tiny_model, tmp_path):
    port, log_path = reserve_port(), tmp_path / "engine.log"
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(tiny_model), str(port), str(log_path)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert owner.stdout is not None
        while await owner.stdout.readline() != b"serving\n":
            assert not owner.stdout.at_eof()
        (server,) = children(owner.pid)
        assert len(family(server)) > 1
        async with aiohttp.ClientSession(headers=KNOWN) as http:
            call = await answering(http, port)
            owner.kill()
            await owner.wait()
            await until_gone(server)
            call.close()
    finally:
        if owner.returncode is None:
            owner.kill()
            await owner.wait()


async def test_a_server_that_dies_while_it_starts_is_reported_with_its_last_words(tiny_model, tmp_path):
    policy = tiny_policy(tiny_model)
    policy = msgspec.structs.replace(policy, engine=msgspec.structs.replace(policy.engine, arguments=("--no-such",)))
    engine = EngineProcess(policy, port=reserve_port(), log_path=tmp_path / "engine.log")
    with pytest.raises(EngineError, match=r"ended with status 2 while it started(.|\n)*--no-such"):
        async with engine:
            pass
    assert engine.pid is not None
    await until_gone(engine.pid)


async def test_a_server_that_does_not_come_up_in_time_is_ended(tiny_model, tmp_path):
    policy = tiny_policy(tiny_model)
    policy = msgspec.structs.replace(policy, engine=msgspec.structs.replace(policy.engine, start_timeout_s=0.5))
    engine = EngineProcess(policy, port=reserve_port(), log_path=tmp_path / "engine.log")
    with pytest.raises(EngineError, match=r"did not serve within 0\.5 s"):
        async with engine:
            pass
    assert engine.pid is not None
    await until_gone(engine.pid)
