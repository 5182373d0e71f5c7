"""Whoever starts a client while the broker is down reads one good line, not the way that the error has come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from swarmq.keys import Invite
from swarmq.runtime.processes import reserve_port

SCRIPTS = {
    "client": "import swarmq\nswarmq.SwarmClient({invite!r})",
    "async": "import asyncio, swarmq\nasync def main():\n    async with swarmq.AsyncSwarmClient({invite!r}): pass\nasyncio.run(main())",
    "worker": "from swarmq.cli import main\nmain(['worker', 'agent:attempt', '--invite', {invite!r}])",
    "workers": "from swarmq.cli import main\n"
    "if __name__ == '__main__': main(['worker', 'agent:attempt', '--processes', '2', '--invite', {invite!r}])",
}
FRAMES = {"client": 2, "async": 8, "worker": 0, "workers": 0}
"""A script that raises shows where it did, and asyncio's own frames; nothing of how we connect."""


def test_clients_that_start_while_the_broker_is_down_say_so_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def attempt(ep): return 1.0")
    invite = Invite(
        run="r",
        client="a",
        secret=b"s" * 32,
        amqp_url=f"amqp://u:p@127.0.0.1:{reserve_port()}/",
        base_url="http://127.0.0.1:1/v1",
        policies=("main",),
        kinds=("k",),
        group_size=1,
    ).encode()
    running = {}
    for name, script in SCRIPTS.items():
        path = tmp_path / f"{name}_script.py"
        path.write_text(script.format(invite=invite))
        environment = {
            **os.environ,
            "SWARMQ_SPOOL": str(tmp_path),
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        }
        running[name] = subprocess.Popen(
            [sys.executable, str(path)], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
        )
    for name, process in running.items():
        said = process.communicate(timeout=300)[1]
        assert process.returncode == 1, said
        assert said.count('  File "') <= FRAMES[name], said
        assert "broker/amqp.py" not in said, said
        assert [line for line in said.splitlines()[-3:] if "cannot be reached" in line], said
