"""A port that was found free is still free when it is bound."""

import socket
import struct
from pathlib import Path

import pytest

from swarmq.runtime.processes import find_free_port, is_port_free, reserve_port

LOCAL_PORT_RANGE = 51
"""IP_LOCAL_PORT_RANGE: from which ports the system may choose for a socket."""


def test_a_free_port_is_none_that_the_system_may_hand_out_meanwhile():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = find_free_port()
    assert is_port_free(port)
    assert port < first or first <= 20_000


def test_a_port_is_not_found_twice_as_nobody_may_have_bound_it_yet(monkeypatch):
    """Engine and proxy of a run once got the same one."""
    draws = iter([7_001, 7_001, 7_002])
    monkeypatch.setattr("swarmq.runtime.processes.secrets.randbelow", lambda _: next(draws))
    assert (find_free_port(), find_free_port()) == (27_001, 27_002)


def test_a_held_port_is_given_to_nobody_else_and_its_server_can_listen_there():
    port = reserve_port()
    assert is_port_free(port)
    with socket.socket() as stranger:
        try:
            stranger.setsockopt(socket.IPPROTO_IP, LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
        except OSError:
            pytest.skip("this system cannot be told which port to choose")
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", 0))
    for _ in range(2):  # started again too
        with socket.create_server(("127.0.0.1", port)):
            assert not is_port_free(port)
