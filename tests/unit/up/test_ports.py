"""Ports that a run keeps for its proxies are free at every address of the host."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from swarmq.config import Policy, SwarmJob
from swarmq.up.ports import assign_ports


def test_a_port_at_which_another_address_listens_is_not_taken_again(tmp_path: Path) -> None:
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model="m")})
    job.run_folder.path.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.2", 0)) as other:
        taken = other.getsockname()[1]
        (job.run_folder.path / "ports.json").write_bytes(msgspec.json.encode({"proxy": taken}))
        first = assign_ports(job, ["proxy"])
    assert first["proxy"] != taken
    assert assign_ports(job, ["proxy"]) == first
    with socket.create_server(("127.0.0.3", first["proxy"])):
        pass  # a server may listen at a port that is kept
    with socket.socket() as greedy:
        greedy.bind(("127.0.0.4", 0))
        assert greedy.getsockname()[1] != first["proxy"]
