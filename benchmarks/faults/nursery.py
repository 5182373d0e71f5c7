"""A process that has imported everything already and forks the parts of a fault run from itself.

    harness ──start──> nursery ──fork──> python -m MODULE ...   a session, an environment and a log of its own
       ^                                    │
       └────────── its end, by pidfd ───────┘

Importing torch and transformers costs a learner seven seconds of processor time, and a long run starts a hundred
learners: without this it would mostly measure imports. A fork runs the same entry point as `python -m MODULE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from swarmq.runtime.processes import die_with_parent

MODULES = (
    "swarmq.learner.train.loop",
    "swarmq.learner.feed.ipc",
    "swarmq.weights.push.pusher",
    "swarmq.proxy.main",
    "swarmq.collector.main",
    "swarmq.client.runners.worker",
    "swarmq.cli",
    "transformers.models.qwen3.modeling_qwen3",
    "openai.resources.chat.completions",
    "safetensors.numpy",
    "aiohttp.web",
    "uvicorn",
)
"""What the parts import."""
ROOT = Path(__file__).parents[2]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork `python -m module arguments`; the answer is its process id."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    """All of it."""
    log: str
    """File that its output is appended to."""


class Reap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A child has ended; the answer is its exit status, as Popen says it."""

    pid: int


class Child:
    """A part that was forked."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid, self._nursery = pid, nursery
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Until it has ended; its exit status."""
        if self.returncode is None:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            watched = os.dup(self._descriptor)
            loop.add_reader(watched, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(watched)
                os.close(watched)
        return self._reap()

    def join(self, timeout_s: float) -> int:
        """As `wait`, for callers without an event loop. Raises TimeoutError."""
        if not self.has_ended(within_s=timeout_s):
            raise TimeoutError(f"process {self.pid} has not ended within {timeout_s:g} s")
        return self._reap()

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        return self.returncode is not None or bool(select.select([self._descriptor], [], [], within_s)[0])

    def _reap(self) -> int:
        if self.returncode is None:
            self.returncode = self._nursery.ask(Reap(pid=self.pid))
            os.close(self._descriptor)
        return self.returncode

    async def stop(self, *, grace_s: float) -> int:
        """SIGTERM, and SIGKILL to its session when it is still there after `grace_s`; its exit status."""
        with contextlib.suppress(TimeoutError):
            if self.returncode is None:
                os.kill(self.pid, signal.SIGTERM)
            async with asyncio.timeout(grace_s):
                await self.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return await self.wait()


class Nursery:
    """The harness's end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[Nursery]:
        """Ready at once; the first start waits for the imports."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.faults.nursery"]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=die_with_parent
        ) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Run `python -m` of `arguments`."""
        module, *rest = arguments
        start = Start(module=module, arguments=rest, environment=dict(environment), log=str(log))
        return Child(self.ask(start), self)

    def ask(self, request: Start | Reap) -> int:
        """An answer takes milliseconds, so nobody need be told that it blocks."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the nursery has ended with status {self._process.wait()}: see what it printed")
        return int(answer)


def main() -> None:
    sys.path[:] = list(dict.fromkeys([str(ROOT), *sys.path]))
    for module in MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which no fork would have"  # noqa: PTH208
    gc.collect()
    gc.freeze()  # keeps the pages shared
    if start := serve(sys.stdin.buffer, sys.stdout.buffer):
        _become(start)
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)


def serve(requests: IO[bytes], answers: IO[bytes]) -> Start | None:
    """Answer requests. Returns in every fork, with what it is to run, and here at the end of requests."""
    decoder = msgspec.json.Decoder(Start | Reap)
    while line := requests.readline():
        match decoder.decode(line):
            case Reap(pid=pid):
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            case Start() as start:
                if (answer := os.fork()) == 0:
                    return start
        answers.write(b"%d\n" % answer)
        answers.flush()
    return None


def _become(start: Start) -> None:
    """Be what `python -m` with this environment and log would have been."""
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for ours, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, standard)
    os.closerange(3, max(nothing, log) + 1)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.path[:] = list(dict.fromkeys([*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]))
    sys.argv = [start.module, *start.arguments]


if __name__ == "__main__":
    main()
