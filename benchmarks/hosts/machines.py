"""Machines of a network, as Linux namespaces on this one. Needs root.

Each machine has a network, mounts, processes, IPC and a name of its own. It can read this machine's programs, but write nothing of it: its
disk (`DISK`, `/tmp`, `/var/tmp`) is memory that no other machine sees, and so is its `/dev/shm`, which it loses when it is killed. Their
network cards are joined by a switch in a namespace of its own, so no packet passes through this machine's network.

    with Switch() as switch, switch.machine("gpu0") as machine:
        machine.boot({"server": ["python3", "-m", "http.server", "--bind", machine.address]})
        machine.kill()
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.report import HERE

DISK = "/mnt"
NETWORK = "10.98.0"
CHECKOUT = HERE.parent
READ_ONLY = r"""
set -e
cut -d' ' -f5 /proc/self/mountinfo | grep -vE '^/(proc|sys|dev)(/|$)' | while read -r point; do
    mount -n -o remount,bind,ro "$(printf %b "$point")" 2> /dev/null || [ "$point" != / ]
done
mount -n -t tmpfs -o mode=755 disk /mnt
mkdir /mnt/seen /mnt/tmp /mnt/home /mnt/log
number=0
for folder; do # programs in /tmp stay visible
    number=$((number + 1))
    mkdir "/mnt/seen/$number"
    mount -n --bind "$folder" "/mnt/seen/$number"
done
for folder in /tmp /var/tmp /dev/shm; do mount -n -t tmpfs -o mode=1777 disk "$folder"; done
number=0
for folder; do
    number=$((number + 1))
    mkdir -p "$folder"
    mount -n --move "/mnt/seen/$number" "$folder"
done
rm -r /mnt/seen
printf '127.0.0.1 localhost\n%s %s\n' "$ADDRESS" "$NAME" > /mnt/hosts
mount -n --bind /mnt/hosts /etc/hosts
hostname "$NAME"
ip link set lo up
echo ready
exec cat # until this process's owner ends
"""
"""Makes a machine; arguments are the folders with programs that lie in a folder which it covers."""
BOOT = """
exec 3<&0
trap exit TERM
{ cat <&3 > /dev/null; kill -TERM $$; } & # when this process's owner ends, all processes do
mount -n -t tmpfs shm /dev/shm
keep() { # start a service again whenever it ends
    name=$1
    shift
    while :; do
        echo "== $name starts"
        "$@"
        echo "== $name ended with status $?"
        sleep 1
    done 3<&- < /dev/null >> "/mnt/log/$name" 2>&1
}
"""


def why_not() -> str:
    """Return why machines cannot be made here, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network and mount namespaces need root on Linux"
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "probe", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no namespaces or no bridge here: {done.stderr.strip()}" if done.returncode else ""


class Switch:
    """The network of some machines."""

    def __enter__(self) -> Self:
        self._holder = _hold(["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
        self._ip("link", "add", "switch", "type", "bridge")
        self._ip("link", "set", "switch", "up")
        self._num = 0
        return self

    def __exit__(self, *_: object) -> None:
        _release(self._holder)

    @contextlib.contextmanager
    def machine(self, name: str) -> Iterator[Machine]:
        """Make a machine and connect it."""
        self._num += 1
        machine = Machine(name, f"{NETWORK}.{self._num}", self)
        try:
            holder = str(machine.holder.pid)
            self._ip("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", holder)
            self._ip("link", "set", name, "master", "switch", "up")
            machine.run(["ip", "address", "add", f"{machine.address}/24", "dev", "eth0"])
            machine.run(["ip", "link", "set", "eth0", "up"])
            yield machine
        finally:
            machine.kill()
            _release(machine.holder)

    def connect(self, name: str, *, on: bool) -> None:
        """Plug a machine's cable in, or pull it out: neither it nor the others are told."""
        self._ip("link", "set", name, "up" if on else "down")

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", "--target", str(self._holder.pid), "--net", "ip", *words], check=True)


class Machine:
    """A machine, which is off at first."""

    def __init__(self, name: str, address: str, switch: Switch) -> None:
        self.name, self.address, self._switch = name, address, switch
        programs = {CHECKOUT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
        hidden = [str(path) for path in programs if path.parts[1] == "tmp" or path.parts[1:3] == ("var", "tmp")]
        own = ["--net", "--mount", "--uts", "--ipc", "--propagation=private"]
        environment = {**os.environ, "NAME": name, "ADDRESS": address}
        self.holder = _hold(["unshare", *own, "sh", "-c", READ_ONLY, "sh", *hidden], environment)
        self._running: subprocess.Popen[bytes] | None = None
        self._script = ""

    def path(self, path: str | Path) -> Path:
        """Return the path by which this process reaches a file of the machine."""
        return Path(f"/proc/{self.holder.pid}/root{path}")

    def run(self, argv: Sequence[str]) -> str:
        """Run a command there, also while the machine is off, and return its output. Raises RuntimeError if it fails."""
        done = subprocess.run(
            self._inside(argv), env=self._environment(), cwd="/", capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {shlex.join(argv)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout

    def boot(self, services: Mapping[str, Sequence[str]] | None = None) -> None:
        """Switch the machine on: it runs these services, or those of the last time, and starts each again whenever it ends."""
        if services is not None:
            kept = (f"keep {name} {shlex.join(argv)} &" for name, argv in services.items())
            self._script = "\n".join([BOOT, *kept, "wait"])
        apart = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        argv = self._inside([*apart, "sh", "-c", self._script])
        with self.path(f"{DISK}/log/boot").open("ab") as log:
            self._running = subprocess.Popen(
                argv, env=self._environment(), cwd="/", stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """Kill all processes of the machine with SIGKILL; its disk stays."""
        if self._running is None:
            return
        for first in Path(f"/proc/{self._running.pid}/task/{self._running.pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(first), signal.SIGKILL)  # the kernel kills all others before it is gone
        self._running.communicate()
        self._running = None

    def cut_off(self) -> None:
        self._switch.connect(self.name, on=False)

    def reconnect(self) -> None:
        self._switch.connect(self.name, on=True)

    def logs(self, *, last: int = 3000) -> str:
        """Return the end of each service's log."""
        return "\n".join(
            f"== {self.name} {path.name}\n{path.read_text(errors='replace')[-last:]}"
            for path in sorted(self.path(DISK + "/log").iterdir())
        )

    def _inside(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.holder.pid), "--mount", "--net", "--uts", "--ipc", "--", *argv]

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "SWARMQ_"))}
        return own | {
            "HOME": f"{DISK}/home",
            "TMPDIR": f"{DISK}/tmp",
            "PYTHONPATH": ":".join([f"{CHECKOUT}/src:{CHECKOUT}:{CHECKOUT}/tests", own.get("PYTHONPATH", "")]).rstrip(
                ":"
            ),
        }


def _hold(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a process that keeps namespaces open until it is released or this process ends."""
    holder = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout
    if holder.stdout.readline() != b"ready\n":
        raise RuntimeError(f"`{shlex.join(argv[:6])} ...` ended with status {holder.wait()}")
    return holder


def _release(holder: subprocess.Popen[bytes]) -> None:
    holder.communicate()
