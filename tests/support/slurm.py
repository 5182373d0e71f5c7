"""A Slurm cluster of four nodes on this host, from Debian's slurm-wlm: munge, slurmctld and a slurmd for each node."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from swarmq.runtime.processes import find_free_port

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
UP_S = 60.0
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={job}
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 State=UNKNOWN\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


def why_not() -> str:
    """Return why no cluster can be run here, or ""."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    return "" if shutil.which("apt-get") else "the packages are Debian's"


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def lose(self, node: str) -> None:
        """Kill a node's daemon, with what it runs, and tell the controller so, which would notice it in some minutes."""
        self._daemons[node].kill()
        for pid in find_processes(f"SLURMD_NODENAME={node}\0".encode()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def find_nodes(self, variable: bytes) -> set[str]:
        """Return the nodes with a process whose environment contains this text."""
        found = set(find_processes(variable))
        return {node for node in NODES if found & set(find_processes(f"\0SLURMD_NODENAME={node}\0".encode()))}

    def __call__(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for pid in find_processes(str(self.folder).encode()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def find_processes(variable: bytes) -> list[int]:
    """Return the processes whose environment contains this text; a job's processes have the cluster's and its node's name there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if variable in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster with all its files in `folder`, which is short enough for a socket."""
    _install()
    host = socket.gethostname().partition(".")[0]
    lines = [NODE.format(name=name, host=host, port=find_free_port()) for name in NODES]
    job = 1 + secrets.randbelow(10000)  # the script's ports follow from it, and another cluster may be on this host
    text = CONFIG.format(host=host, port=find_free_port(), folder=folder, job=job) + "".join(lines) + PARTITION
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(secrets.token_bytes(64))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    made = Cluster(folder)
    try:
        places = [
            f"--{name}={folder}/munge.{name.partition('-')[0]}"
            for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")
        ]
        made.start("munged", "munged", "--foreground", "--force", *places)
        _wait_for(folder / "munge.socket")
        made.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            made.start(node, "slurmd", "-D", "-N", node)
        until = time.monotonic() + UP_S
        while made("sinfo", "--noheader", "--format=%D %t").split() != [str(len(NODES)), "idle"]:
            assert time.monotonic() < until, made("sinfo", "--list-reasons")
            time.sleep(0.2)
        yield made
    finally:
        made.stop()


def _install() -> None:
    if not all(map(shutil.which, PROGRAMS)):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["update", "-q"],
            ["install", "-q", "-y", "--no-install-recommends", "slurm-wlm", "munge", "openssl"],
        ):
            subprocess.run(["apt-get", *command], env=environment, check=True, capture_output=True)


def _wait_for(path: Path) -> None:
    until = time.monotonic() + UP_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.1)
