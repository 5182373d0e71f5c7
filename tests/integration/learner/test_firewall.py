"""Ranks on two hosts, of which a firewall lets only the port of rank 0's store through."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from benchmarks.hosts.link import Link

from support.launch import environment

PORT = 29500
RULES = (
    "-i lo -j ACCEPT",
    "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    f"-p tcp --dport {PORT} -j ACCEPT",
    "-p tcp -j DROP",
)


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid() or not shutil.which("iptables"):
        pytest.skip("network namespaces and firewalls need root and iptables")
    with Link(gbit_per_s=1, round_trip_s=0.001) as link:
        yield link


def meet(link: Link, connect_s: float) -> list[str]:
    """What a rank on each host prints."""
    started = []
    for rank, host in enumerate(link.hosts):
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": link.addresses[0], "MASTER_PORT": PORT}
        argv = link.command(host, [sys.executable, "-m", "support.meeting_ranks", str(connect_s)])
        variables = environment() | {name: str(value) for name, value in place.items()}
        started.append(subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, text=True))
    return [each.communicate(timeout=600)[0] for each in started]


def test_ranks_that_meet_but_cannot_connect_are_told_which_ports_to_open(link: Link) -> None:
    for host in link.hosts:
        for rule in RULES:
            link.run(host, ["iptables", "-A", "INPUT", *rule.split()])
    for rank, told in enumerate(meet(link, connect_s=1.0)):
        assert f"rank {rank} on " in told
        assert f"met the others at {link.addresses[0]}:{PORT} but cannot connect to them" in told
        assert "open all TCP ports between the hosts" in told
