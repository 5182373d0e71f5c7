"""A host is reached through a real ssh server without any token, and the tunnel ends with the program that opened it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import getpass
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import uvicorn

from support.host import ROOT, ScriptedCheck, ScriptedLauncher, job
from support.ssh import ssh_server, why_not
from swarmq import HostClient, launch
from swarmq.errors import HostError
from swarmq.host_daemon.access import HostAccess
from swarmq.host_daemon.app import create_app
from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.main import listen_on_file
from swarmq.host_daemon.service import HostService
from swarmq.testing.app_server import AppServer

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def in_thread(function, *args, **kwargs):
    return asyncio.to_thread(functools.partial(function, *args, **kwargs))


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="swarmq ssh") as folder:  # short, as the paths of sockets must be
        yield Path(folder)


@pytest.fixture
def address(tmp_path, monkeypatch):
    with ssh_server(tmp_path) as (port, command):
        monkeypatch.setenv("SWARMQ_SSH", command)
        yield f"ssh://{getpass.getuser()}@127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def serve(path: Path):
    folder = HostFolder(path)
    service = HostService(folder, ScriptedLauncher(), ScriptedCheck(folder.path, 0), most_running=1, most_queued=1)
    with listen_on_file(folder.socket) as listener:
        async with service.open(), asyncio.TaskGroup() as tasks:
            server = AppServer(uvicorn.Config(create_app(service, HostAccess(ROOT)), lifespan="off", log_config=None))
            tasks.create_task(server.serve(sockets=[listener]))
            await server.listening.wait()
            try:
                yield
            finally:
                server.stop.set()


async def test_a_run_is_launched_over_ssh_with_the_rights_of_the_daemon_s_user(path, address):
    async with serve(path / "runs"):
        client = await in_thread(HostClient, f"{address}{str(path).replace(' ', '%20')}/runs")
        try:
            run = await in_thread(launch, job("math"), host=client)
            view = await in_thread(run.status)
            assert (view.state, view.owner) == ("starting", getpass.getuser())
            own_port = await in_thread(client.tunnel.forward, "127.0.0.1", int(address.rpartition(":")[2]))
            reader, writer = await asyncio.open_connection("127.0.0.1", own_port)
            assert (await reader.readline()).startswith(b"SSH-")
            writer.close()
        finally:
            client.close()
        assert not client.tunnel.socket.exists()


async def test_what_is_wrong_with_a_way_by_ssh_is_said(path, address, monkeypatch):
    with pytest.raises(
        HostError, match=r"No such file or directory; the daemon's folder is expected at /nowhere there"
    ):
        await in_thread(HostClient, f"{address}/nowhere")
    with pytest.raises(HostError, match="the daemon's folder is expected at ~/no-runs-here there"):
        await in_thread(HostClient, f"{address}/~/no-runs-here")
    (path / "runs" / ".host").mkdir(parents=True)
    client = await in_thread(HostClient, f"{address}{str(path).replace(' ', '%20')}/runs", patience_s=0.0)
    with pytest.raises(HostError, match="cannot be reached"):
        await in_thread(client.runs)
    client.close()
    monkeypatch.setenv(
        "SWARMQ_SSH", "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    )
    with pytest.raises(HostError, match="Permission denied"):
        await in_thread(HostClient, f"{address}/runs")


async def test_the_tunnel_of_a_killed_program_ends(path, address):
    program = f"import swarmq, sys; c = swarmq.HostClient({address + str(path).replace(' ', '%20') + '/runs'!r}); print(c.tunnel.socket, flush=True); sys.stdin.read()"
    async with serve(path / "runs"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        socket_file = (await process.stdout.readline()).decode().strip()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        async with asyncio.timeout(60):
            while mentions(socket_file):  # noqa: ASYNC110 - no child of this process
                await asyncio.sleep(0.05)


def mentions(text: str) -> bool:
    """Return whether the command line of a process has this text."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / "cmdline").read_bytes():
                    return True
    return False
