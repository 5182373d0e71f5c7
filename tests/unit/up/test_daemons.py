"""A part that dies is started again, and people are told why it died; one that says that this is of no use ends the run at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from swarmq.broker.admin.invitations import make_host_invite
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.up import Deployment, Endpoints, ports, supervision
from swarmq.up.supervision import Daemon, DaemonFailedError

REFUSES = "import sys; sys.stderr.write('some line\\nswarmq: train.lora: no such thing\\nanother\\n'); sys.exit(%d)"


def restart_after(wait_s: float) -> supervision.RestartTimes:
    return supervision.RestartTimes(backoff_s=(wait_s,) * supervision.MAX_DEATHS)


async def warned(tmp_path: Path, *, status: int, wait: float) -> list[str]:
    """What is told of a part that ends with this status, until it is given up."""
    (log := tmp_path / "part.log").write_text("swarmq: said by another start\n")
    argv, told = [sys.executable, "-c", REFUSES % status], list[str]()
    daemon = Daemon("learner.main", argv, log, times=restart_after(wait))
    await daemon.start()
    with pytest.raises(DaemonFailedError) as failure:
        await daemon.keep_running(told.append)
    return [*told, str(failure.value)]


async def test_people_are_told_what_a_part_said_when_it_died(tmp_path: Path) -> None:
    *told, _ = await warned(tmp_path, status=1, wait=0.0)
    assert told == ["learner.main died with status 1 (train.lora: no such thing); restarting in 0 s"] * (
        supervision.MAX_DEATHS - 1
    )


async def test_where_process_ids_stand_they_are_those_of_now(tmp_path: Path) -> None:
    job = SwarmJob.build(
        {"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "m"}}, "broker": {"url": "amqp://b/"}}
    )
    job.run_folder.path.mkdir()
    invite = make_host_invite(job, ("http://127.0.0.1:1/v1",))
    deployment = Deployment(job, None, invite, engines={}, placements={})
    once = (
        f"import os, sys; os.path.exists('{tmp_path}/died') and sys.exit(0); open('{tmp_path}/died', 'w'); sys.exit(1)"
    )
    daemon = Daemon(
        "collector",
        [sys.executable, "-c", once],
        tmp_path / "log",
        times=restart_after(0.0),
        restarted=deployment.write_endpoints,
    )
    deployment.daemons["collector"] = daemon
    await daemon.start()
    first = daemon.process.pid
    deployment.write_endpoints()
    await daemon.keep_running(lambda _: None)
    written = msgspec.json.decode(job.run_folder.endpoints.read_bytes(), type=Endpoints).pids
    assert written == {"collector": daemon.process.pid} != {"collector": first}


async def test_what_can_never_be_up_is_not_started_again(tmp_path: Path) -> None:
    told = await warned(tmp_path, status=os.EX_CONFIG, wait=3600.0)
    assert told == ["learner.main: train.lora: no such thing"]


async def test_a_port_that_others_have_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job = SwarmJob.build({"run": "r", "policies": {"main": {"model": "m"}}, "proxy": {"port": port}})
        with pytest.raises(
            ConfigError, match=rf"proxy.port: cannot listen on 127.0.0.1:{port} \(Address already in use\)"
        ):
            await ports.wait_for_proxy_ports(job, wait_s=0.2)
    await ports.wait_for_proxy_ports(job)


@pytest.mark.slow
def test_a_learner_says_so_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'run = "r"\nfolder = "{tmp_path}"\n[policies.main]\nmodel = "/nowhere"\n[broker]\nurl = "amqp://127.0.0.1:1"\n'
    )
    command = [sys.executable, "-m", "swarmq", "learner", str(job), "--no-collector"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == os.EX_CONFIG
    assert "swarmq: model /nowhere: there is no such folder" in ended.stderr
