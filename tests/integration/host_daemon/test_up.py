"""A real `swarmq up` under a real daemon: both are killed, and the run is found, started again and stopped."""

from __future__ import annotations

import os
import signal
import time

import pytest

from support.host_process import HostProcess
from support.tiny_model import tiny_model
from swarmq import HostClient, SwarmJob, launch
from swarmq.config import EngineSettings, Policy
from swarmq.errors import HostError

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

NO_ENGINE = "http://127.0.0.1:1"
"""Nothing is served or trained; RabbitMQ, proxy, collector and learner are real."""


def test_a_run_survives_the_deaths_of_its_daemon_and_of_its_own_process(tmp_path):
    daemon = HostProcess(tmp_path / "runs")
    daemon.start()
    try:
        client = HostClient(daemon.url, token=daemon.token("admin"), patience_s=120.0)
        policy = Policy(model=str(tiny_model()), engine=EngineSettings(urls=(NO_ENGINE,)))
        run = launch(SwarmJob(run="math", policies={"main": policy}), host=client)
        first = run.wait("up")
        pid = daemon.up_pid("math")
        assert os.getsid(pid) == pid, "a session of its own"

        daemon.kill()
        os.kill(pid, 0)
        daemon.start()
        assert (run.status().state, run.status().started_at) == ("up", first.started_at)

        os.kill(pid, signal.SIGKILL)
        while (view := run.status()).restarts == 0:
            time.sleep(0.1)
        assert view.detail == "its process died, and the run was started again"
        run.wait("up")
        assert daemon.up_pid("math") != pid

        with pytest.raises(HostError, match="stop it first"):
            run.delete()
        assert run.stop().state == "stopping"
        run.wait("stopped")
        assert any("stopped. `swarmq up" in line for line in run.logs())
        run.delete()
        assert not (tmp_path / "runs" / "math").exists()
    finally:
        daemon.end()
