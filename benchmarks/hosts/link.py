"""Two hosts, as network namespaces that share no loopback, and a link between them with a rate and a delay. Needs root.

netem does this in the kernel, but not every kernel has it. Here each namespace has a TUN device, and a process of its own carries
packets from one to the other when their time has come. TCP is the kernel's, with its real slow start and windows; packets come and
go in the large pieces that a network card would cut. A packet that would wait longer than `QUEUE_S` for the link is dropped.

    with Link(gbit_per_s=1, round_trip_s=0.03) as link:
        link.run(link.hosts[0], ["curl", f"http://{link.addresses[1]}:8000"])
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
MAX_PACKET = 70_000
QUEUE_S = 0.05
PREFIX = "swq"


class Link:
    """The first host is the learner's, the second the engine's."""

    def __init__(self, *, gbit_per_s: float, round_trip_s: float) -> None:
        self._gbit_per_s, self._round_trip_s = gbit_per_s, round_trip_s
        pid = os.getpid() % 100_000
        self.hosts = (f"{PREFIX}{pid}a", f"{PREFIX}{pid}b")
        self.addresses = ("10.99.0.1", "10.99.0.2")
        self._carrier: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        devices = [_open_device(host) for host in self.hosts]
        try:
            for host, own, other in zip(self.hosts, self.addresses, reversed(self.addresses), strict=True):
                _ip("netns", "add", host)
                _ip("link", "set", host, "netns", host)
                _ip("-n", host, "link", "set", "lo", "up")
                _ip("-n", host, "address", "add", own, "peer", other, "dev", host)
                _ip("-n", host, "link", "set", host, "up", "txqueuelen", "10000")
            ends = [str(device) for device in devices]
            speed = [str(self._gbit_per_s * 1e9 / 8), str(self._round_trip_s / 2)]
            argv = [sys.executable, "-m", "benchmarks.hosts.link", *ends, *speed]
            self._carrier = subprocess.Popen(argv, pass_fds=devices)
        except BaseException:
            self._remove()
            raise
        finally:
            for device in devices:
                os.close(device)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", host, *argv]

    def run(self, host: str, argv: Sequence[str]) -> str:
        done = subprocess.run(self.command(host, argv), check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def _remove(self) -> None:
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.wait()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host], check=False, stderr=subprocess.DEVNULL)


def sent_bytes() -> int:
    """Bytes that this process's host has put on its link since it was made, with all headers."""
    with open("/proc/net/dev") as counters:  # noqa: PTH123
        line = next(line for line in counters if line.strip().startswith(PREFIX))
    return int(line.partition(":")[2].split()[8])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
        self.source = source
        self._target, self._bytes_per_s, self._delay_s = target, bytes_per_s, delay_s
        self._free_at = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read all packets that the source has."""
        while True:
            try:
                packet = os.read(self.source, MAX_PACKET)
            except BlockingIOError:
                return
            now = time.monotonic()
            if self._free_at - now > QUEUE_S:
                continue
            self._free_at = max(now, self._free_at) + len(packet) / self._bytes_per_s
            self._waiting.append((self._free_at + self._delay_s, packet))

    def deliver(self) -> float | None:
        """Write all packets that are due, and return the seconds until the next one is."""
        while self._waiting:
            wait_s = self._waiting[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            try:
                os.write(self._target, self._waiting.popleft()[1])
            except OSError:  # the device goes down at the end
                return None
        return None


def carry(first: int, second: int, bytes_per_s: float, delay_s: float) -> None:
    ways = [Direction(first, second, bytes_per_s, delay_s), Direction(second, first, bytes_per_s, delay_s)]
    while True:
        waits: list[Any] = [wait for way in ways if (wait := way.deliver()) is not None]
        readable, _, _ = select.select([first, second], [], [], min(waits, default=None))
        for way in ways:
            if way.source in readable:
                way.take()


if __name__ == "__main__":
    carry(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
