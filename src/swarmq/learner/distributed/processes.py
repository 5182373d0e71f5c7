"""The learner's child processes: the collector, and the ranks if `--num-gpus` asks for several.

Child processes run in sessions of their own and end with their parent. A rank that dies ends the others; the next start resumes
from checkpoint and batch log.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from swarmq.config import SwarmJob
from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.runtime.files import write_atomically
from swarmq.runtime.processes import die_with_parent

log = structlog.get_logger()

LOOPBACK = "127.0.0.1"
STORE_SOCKET_ENV = "SWARMQ_RANKS_MEET_ON"
"""Environment variable with rank 0's file descriptor of the socket on which the ranks' store listens."""
STOP_S = 30.0
BACKOFF_S = 1.0
"""Seconds before a dead collector is started again, doubled each time up to 32 s."""
MAX_BACKOFF_S = 32.0
WHY = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGABRT: " (a GPU that stopped answering? NCCL ends a rank that waited too long for the others)",
}
CAUSE_WAIT_S = 1.0
STEADY_S = 120.0
"""Seconds that a process must live before the delay of its next restart is short again."""


def is_rank() -> bool:
    """Return whether a launcher (torchrun, accelerate, Slurm, swarmq) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main() -> bool:
    """Return whether this process is the learner's only one, or the first that a launcher started."""
    return not is_rank() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def run_collector(job: SwarmJob, policy: str) -> Iterator[None]:
    """Keep `swarmq collector` running while the context is open, and stop it at the end."""
    keeper = CommandKeeper([sys.executable, "-m", "swarmq", "collector", str(write_job_file(job, policy))])
    try:
        yield
    finally:
        keeper.stop()


def run_ranks(argv: Sequence[str], num_ranks: int, *, cause_wait_s: float = CAUSE_WAIT_S) -> None:
    """Start `num_ranks` ranks with the command `argv`, and wait for all of them. If a rank fails, stop the others and raise
    LearnerError.

    SIGTERM and SIGINT reach the ranks as SIGTERM; rank 0 decides when all ranks stop. `cause_wait_s`: seconds to wait
    after a rank's failure, because another rank that was killed may be the cause, and its end be noticed a little later.
    """
    ranks = start_ranks(argv, num_ranks)

    def forward(*_: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()

    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for number, rank in enumerate(ranks):
        threading.Thread(target=lambda n=number, r=rank: ended.put((n, r.wait())), daemon=True).start()
    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for _ in ranks:
            number, status = ended.get()
            if status:
                number, status = _find_first_failure(number, status, ended, cause_wait_s)
                if status == os.EX_CONFIG:
                    raise SetUpError(f"rank {number} of {num_ranks} refuses the settings: see its last line above")
                raise LearnerError(
                    f"rank {number} of {num_ranks} {_how(status)}: see its log lines above; nothing is lost, the next start "
                    "resumes from the newest checkpoint and the batch log"
                )
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def start_ranks(argv: Sequence[str], num_ranks: int) -> list[subprocess.Popen[bytes]]:
    """Start ranks with torchrun's environment variables, but let them meet on a loopback address.

    torch would listen on every interface, whatever MASTER_ADDR says, so anybody who reaches the port could join without a
    password. Therefore rank 0 gets a socket that is already bound.
    """
    with socket.create_server((LOOPBACK, 0)) as meeting:
        world = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(meeting.getsockname()[1]),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            STORE_SOCKET_ENV: str(meeting.fileno()),
        }
        return [
            _start(argv, world | {"RANK": str(n), "LOCAL_RANK": str(n)}, () if n else (meeting.fileno(),))
            for n in range(num_ranks)
        ]


def _find_first_failure(
    number: int, status: int, ended: queue.SimpleQueue[tuple[int, int]], wait_s: float
) -> tuple[int, int]:
    """Return index and exit status of the rank that failed first: a killed one, else the one that was noticed first.

    `number`, `status`: index and exit status of the rank that was noticed first. `ended`: those of the ranks that end later.
    """
    with contextlib.suppress(queue.Empty):
        while status != -signal.SIGKILL:
            other = ended.get(timeout=wait_s)
            if other[1] == -signal.SIGKILL:
                return other
    return number, status


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    killer = signal.Signals(-status)
    return f"was killed by {killer.name}{WHY.get(killer, '')}"


def write_job_file(job: SwarmJob, policy: str) -> Path:
    """Write the job for the collector; the file may contain the broker's password. Raises LearnerError if it cannot be written."""
    path = job.run_folder.path / policy / "job.toml"
    with map_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, job.to_toml().encode())
    return path


class CommandKeeper:
    """Supervisor of a command: restarts it when it dies, until stopped."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._stopping = threading.Event()
        self._child = _start(argv, {})
        self._thread = threading.Thread(target=self._watch, name=f"keeper of {argv[-2]}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._child.terminate()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            self._child.kill()
            self._thread.join()

    def _watch(self) -> None:
        delay_s = BACKOFF_S
        while True:
            began = time.monotonic()
            status = self._child.wait()
            if time.monotonic() - began > STEADY_S:
                delay_s = BACKOFF_S
            if self._stopping.is_set():
                return
            log.warning("child_died", command=" ".join(self._argv[2:]), status=status, again_in_s=delay_s)
            if self._stopping.wait(delay_s):
                return
            delay_s = min(2 * delay_s, MAX_BACKOFF_S)
            self._child = _start(self._argv, {})
            if self._stopping.is_set():
                self._child.terminate()


def _start(
    argv: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
        pass_fds=descriptors,
    )
