"""A port that was found free is still free when it is bound."""

from pathlib import Path

from swarmq.process import free_port, port_is_free


def test_a_free_port_is_none_that_the_system_may_hand_out_meanwhile():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert port_is_free(port)
    assert port < first or first <= 20_000
