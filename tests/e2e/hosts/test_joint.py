"""A run on three hosts that share neither disk nor loopback, each of which is cut off, killed and brought back."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from benchmarks.hosts.joint import LEAST_RISE, play
from benchmarks.hosts.machines import DISK, Machine, Switch, why_not

from support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.broker,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

SERVE = "import socket; s = socket.create_server(('{}', {}))\nwhile True: s.accept()"


def reaches(machine: Machine, address: str, port: int) -> bool:
    try:
        machine.run(["timeout", "3", "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"])
    except RuntimeError:
        return False
    return True


def test_hosts_share_neither_disk_nor_memory_nor_loopback_nor_processes() -> None:
    with Switch() as switch, switch.machine("one") as one, switch.machine("two") as two:
        for folder in (DISK, "/tmp", "/var/tmp", "/dev/shm"):
            one.run(["touch", f"{folder}/of-one"])
            assert one.path(f"{folder}/of-one").exists()
            assert not two.path(f"{folder}/of-one").exists()
            assert not Path(f"{folder}/of-one").exists()
        for folder in ("/", "/etc", Path.home(), sys.prefix):
            with pytest.raises(RuntimeError, match="Read-only file system"):
                one.run(["touch", f"{folder}/of-one"])
        ports = {"127.0.0.1": 9001, one.address: 9002}
        one.boot({f"at-{port}": [sys.executable, "-c", SERVE.format(address, port)] for address, port in ports.items()})
        while not (reaches(one, "127.0.0.1", 9001) and reaches(one, one.address, 9002)):
            time.sleep(0.1)
        assert [reaches(two, *at) for at in [*ports.items(), (one.address, 9001)]] == [False, True, False]
        one.cut_off()
        assert not reaches(two, one.address, 9002)
        one.reconnect()
        assert reaches(two, one.address, 9002)
        one.kill()
        assert not reaches(two, one.address, 9002)
        assert one.path(f"{DISK}/of-one").exists()


def test_a_run_on_three_hosts_learns_and_loses_no_episode_while_each_of_them_is_cut_off_and_killed() -> None:
    result = play(tiny_model())
    assert result.hosts == 3
    assert result.faults == 6
    assert result.verdict.faults == {}
    assert (result.verdict.lost, result.verdict.twice) == (0, 0)
    assert result.verdict.account.trained > 0
    assert result.reward_after > result.reward_before + LEAST_RISE
    assert min(result.rank_starts.values()) >= 3, "the first start, and after the loss of either rank's host"
