"""Sandboxes for programs that a model wrote.

    Sandbox.detect() ── tries bubblewrap, then Landlock; each must hold against a hostile probe ──> Sandbox
    sandbox.run(command, files=..., stdin=...) ── a fresh sandbox, watched by this thread ──> ProgramRun

    this process ── sandbox_launch.py, which ends and reaps the program, removes its folder ── (bwrap ──) program

| isolation  | made of                                                        | the program sees                  |
|------------|----------------------------------------------------------------|-----------------------------------|
| bubblewrap | own PID, network, IPC, mount (and without root user) namespaces | its folder, Python, system libraries |
| landlock   | Landlock, seccomp, under root a user of its own                | its folder, Python, system libraries |
| rlimits    | limits, seccomp where possible; only with `allow_weak`         | all files that its user may read  |

In every one: a seccomp filter, limits on time, CPU, memory, processes, output, file sizes and disk; an empty environment; no
process, zombie or folder stays behind, also after a SIGKILL of this process. What the program prints is data: compute the verdict from it outside of the sandbox.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import marshal
import os
import random
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
import structlog

from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.errors import SandboxError
from swarmq.rewards.sandbox_launch import remove_folder

log = structlog.get_logger("swarmq.rewards")

Isolation = Literal["bubblewrap", "landlock", "rlimits"]
STRONG: tuple[Isolation, ...] = ("bubblewrap", "landlock")

LAUNCH = Path(__file__).with_name("sandbox_launch.py")
FOLDER = "/work"
"""The program's folder under bubblewrap."""
PREFIX = "swarmq-sandbox-"
"""Prefix of the program's folder, in the folder for temporary files, under the other isolations."""
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
MARSHAL_VERSION = 2
"""Version of the marshal format in which `sandbox_launch.py` gets its plan; every Python reads it."""
POLL_S = 0.03
END_S = 60.0
"""Maximum seconds until all processes of a killed sandbox are gone."""
START_S = 60.0
"""Seconds in which a sandbox must have started; they do not count as the program's time."""
MIB = 1024 * 1024
MAX_PATH = 2000
"""Maximum characters of a path in the program's folder; the contents of much longer paths could not be measured."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one run of a program and its children."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Maximum CPU seconds of all processes together."""
    memory_bytes: int = 512 * MIB
    """Maximum bytes of the address space of each process, and of the memory that all processes use together."""
    processes: int = 32
    """Maximum number of processes and threads at a time."""
    output_bytes: int = MIB
    """Maximum bytes of standard output and standard error together."""
    file_bytes: int = 16 * MIB
    """Maximum bytes of each file."""
    disk_bytes: int = 64 * MIB
    files: int = 10_000
    """Maximum number of files and folders that the program may create."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise SandboxError(f"limits.{name} is {getattr(self, name)}: give a number above 0")
        if self.memory_bytes < 64 * MIB:
            raise SandboxError(f"limits.memory_bytes is {self.memory_bytes}: Python itself needs {64 * MIB}")


class ProgramRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a program. Everything in it is the program's doing: a failure of the sandbox raises SandboxError."""

    exit_code: int
    """Exit code of the program; 128 + the signal's number if a signal ended it."""
    stdout: str
    stderr: str
    stopped: Literal["", "time", "cpu", "memory", "processes", "output", "disk"] = ""
    """Limit that the program exceeded and was killed for; "" if none. A program that handles the error itself (out of memory, no further
    process) is not killed."""
    wall_s: float

    @property
    def problem(self) -> str:
        """What went wrong, in words; "" if the program ended by itself with exit code 0."""
        if self.stopped:
            return f"stopped for its limit of {self.stopped}"
        last = self.stderr.strip().splitlines()[-1:] if self.exit_code else []
        return f"exit code {self.exit_code}{': ' if last else ''}{''.join(last)[:200]}" if self.exit_code else ""


class Sandbox:
    """Runs programs in isolation. Make one with `Sandbox.detect()` and use it from any number of threads."""

    def __init__(self, isolation: Isolation, *, limits: Limits, python: Path, readable: Sequence[str]) -> None:
        """Create a sandbox that nothing has tested; use `detect` instead."""
        self.isolation = isolation
        self.limits = limits
        self.python = python
        self._readable = tuple(readable)

    @classmethod
    def detect(
        cls,
        *,
        limits: Limits | None = None,
        python: Path | str | None = None,
        readable: Sequence[Path | str] = (),
        allow_weak: bool = False,
    ) -> Sandbox:
        """Return a sandbox of the strongest isolation that holds on this host, and log which one it is.

        A hostile program is run in each kind: it tries to read a file and the environment of this process, to signal it, to
        connect to it, to write elsewhere, and to exceed its limits. `python`: interpreter for programs; by default the one that
        runs this process, without its installed packages. `readable`: further files and folders, such as packages.

        Raises SandboxError, with what was wrong with each kind, if none holds. `allow_weak`: then use limits alone, which do not
        keep a program from reading files of its user, and log a warning.
        """
        remove_abandoned_folders()
        kinds: tuple[Isolation, ...] = (*STRONG, "rlimits") if allow_weak else STRONG
        sandbox, problems = find_working(kinds, limits=limits, python=python, readable=readable)
        if sandbox:
            warn = log.warning if sandbox.isolation == "rlimits" else log.info
            warn("sandbox", isolation=sandbox.isolation, python=str(sandbox.python), failed=problems)
            return sandbox
        raise SandboxError(
            f"no sandbox holds on this host: {'; '.join(problems)}. Install bubblewrap (apt-get install bubblewrap), or allow "
            "user namespaces or Landlock (Linux 5.13) for this process; allow_weak=True runs programs with limits alone"
        )

    def with_limits(self, **changes: Any) -> Sandbox:
        """Return the same sandbox with other limits: `sandbox.with_limits(wall_s=2)`."""
        limits = msgspec.structs.replace(self.limits, **changes)
        return Sandbox(self.isolation, limits=limits, python=self.python, readable=self._readable)

    def run(self, command: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = "") -> ProgramRun:
        """Run a program in a fresh sandbox and return what became of it. `python` as the first word of the command is the
        sandbox's interpreter; `files`: name -> content, in the folder in which the program runs.

        Raises SandboxError if the sandbox fails.
        """
        with self.start(command, files=files, stdin=stdin) as running:
            return running.wait()

    async def arun(
        self, command: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = ""
    ) -> ProgramRun:
        """Run a program as `run` does, for coroutines."""

        def run() -> ProgramRun:
            return self.run(command, files=files, stdin=stdin)

        return await run_in_thread(run)

    @contextlib.contextmanager
    def start(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        keep_fds: Sequence[int] = (),
    ) -> Iterator[Running]:
        """Start a program; at the end of the context all its processes are dead. `keep_fds`: pipes that it inherits."""
        for name in files or {}:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise SandboxError(f"files names {name!r}: give a path below the program's folder")
        uid = _pick_uid() if os.geteuid() == 0 else None
        with contextlib.ExitStack() as ours:
            folder, fds = FOLDER, [*keep_fds]
            if self.isolation != "bubblewrap":
                folder, lock = _make_folder()
                ours.callback(os.close, lock)
                fds.append(lock)
            try:
                if folder != FOLDER and uid is not None:
                    os.chown(folder, uid, uid)
                plan = self._plan(command, files or {}, folder, uid, keep_fds)
                running = Running(self, plan, stdin.encode(), fds)
            except BaseException:
                if folder != FOLDER:
                    remove_folder(folder)
                raise
        try:
            yield running
        finally:
            try:
                running.end()
            finally:
                running.close()

    def _plan(
        self, command: Sequence[str], files: Mapping[str, str], folder: str, uid: int | None, keep_fds: Sequence[int]
    ) -> dict[str, Any]:
        words = [str(self.python) if word == "python" and not place else word for place, word in enumerate(command)]
        if words and "/" not in words[0]:
            words[0] = shutil.which(words[0], path="/usr/bin:/bin") or words[0]
        return {
            "isolation": self.isolation,
            "limits": msgspec.to_builtins(self.limits),
            "uid": uid,
            "folder": folder,
            "files": dict(files),
            "readable": self._readable,
            "command": words,
            "keep_fds": list(keep_fds),
            "environment": {
                "PATH": f"{self.python.parent}:/usr/bin:/bin",
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        }

    def wrap(self, launch: list[str], uid: int | None) -> list[str]:
        """Return the command that runs `launch` in namespaces."""
        bwrap = shutil.which("bwrap")
        if not bwrap:
            raise SandboxError("bwrap is not installed")
        options = [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--die-with-parent",
            "--new-session",
        ]
        options += ["--cap-drop", "ALL"]
        if uid is None:
            options += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        else:
            options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        for path in self._readable:
            source = Path(path)
            if source.is_symlink():
                options += ["--symlink", str(source.readlink()), path]
            elif source.exists():
                for parent in reversed(
                    source.parents
                ):  # bwrap would give them the modes of the host's, such as 0700 of /root
                    options += [] if str(parent) == "/" else ["--perms", "0755", "--dir", str(parent)]
                options += ["--ro-bind", path, path]
        options += ["--ro-bind", str(LAUNCH), "/run/launch.py", "--proc", "/proc", "--dev", "/dev"]
        options += ["--perms", "1777", "--size", str(8 * MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108
        options += ["--perms", "1777", "--size", str(self.limits.disk_bytes), "--tmpfs", FOLDER]
        options += ["--symlink", FOLDER, "/tmp", "--remount-ro", "/"]  # noqa: S108
        return [bwrap, *options, "--", *(word if word != str(LAUNCH) else "/run/launch.py" for word in launch)]


class Running:
    """A program in its sandbox, watched by the thread that waits for it."""

    def __init__(self, sandbox: Sandbox, plan: dict[str, Any], stdin: bytes, fds: Sequence[int]) -> None:
        """`fds`: file descriptors that the launching process inherits."""
        self._limits, self._isolation = sandbox.limits, sandbox.isolation
        self._folder = None if sandbox.isolation == "bubblewrap" else plan["folder"]
        self._stop = threading.Event()
        self._next_check = 0.0
        with contextlib.ExitStack() as ours:
            self._fds, self._control = contextlib.ExitStack(), contextlib.ExitStack()
            try:
                self._status, status = _make_pipe(self._fds, ours)
                control, _ = _make_pipe(ours, self._control)
                plan_fd = os.memfd_create("plan")
                ours.callback(os.close, plan_fd)
                launch = [str(sandbox.python), "-I", "-S", "-B", str(LAUNCH), str(plan_fd)]
                plan = {**plan, "status_fd": status, "control_fd": control, "wrapped": []}
                if self._isolation == "bubblewrap":
                    plan["wrapped"] = sandbox.wrap([*launch, "inside"], plan["uid"])
                with os.fdopen(os.dup(plan_fd), "wb") as file:
                    file.write(marshal.dumps(plan, MARSHAL_VERSION))
                self._process = subprocess.Popen(
                    launch,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[status, control, plan_fd, *fds],
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
                self._exit = os.pidfd_open(self._process.pid)
                self._fds.callback(os.close, self._exit)
            except BaseException as error:
                self._fds.close()
                self._control.close()
                if isinstance(error, OSError):
                    raise SandboxError(f"the sandbox cannot be started: {error}") from error
                raise
        self._stdin = stdin
        self._ended = False

    def stop(self) -> None:
        """Make `wait`, in another thread, kill the program and return."""
        self._stop.set()

    def wait(self) -> ProgramRun:
        """Wait for the program's end, or kill the program if it exceeds a limit, and return what became of it."""
        began, ready_at = time.monotonic(), None
        output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        size, stopped, status = 0, "", b""
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        with selectors.DefaultSelector() as selector:
            for pipe, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
                selector.register(pipe, selectors.EVENT_READ, name)
            selector.register(self._status, selectors.EVENT_READ, "status")
            selector.register(self._exit, selectors.EVENT_READ, "exit")
            os.set_blocking(self._process.stdin.fileno(), False)
            rest = memoryview(self._stdin)
            if rest:
                selector.register(self._process.stdin, selectors.EVENT_WRITE, "stdin")
            else:
                self._process.stdin.close()
            next_poll = began
            has_ended = False
            while not stopped and not has_ended:
                for key, _ in selector.select(POLL_S):
                    if key.data == "stdin":
                        try:
                            rest = rest[os.write(key.fd, rest[:65536]) :]
                        except BrokenPipeError:
                            rest = rest[:0]
                        if not rest:
                            selector.unregister(key.fileobj)
                            self._process.stdin.close()
                        continue
                    if key.data == "exit":
                        has_ended = True
                        continue
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.data == "status":
                        status += data
                        ready_at = ready_at or time.monotonic()
                        has_ended = b"\n" in status
                    else:
                        output[key.data].append(data)
                        size += len(data)
                if size > self._limits.output_bytes:
                    stopped = "output"
                    break
                if (now := time.monotonic()) >= next_poll:
                    next_poll = now + POLL_S
                    if has_ended:
                        break
                    if self._stop.is_set():
                        stopped = "time"
                    elif ready_at is None:
                        if now - began > START_S:
                            self.end()
                            raise SandboxError(f"the sandbox did not start in {START_S:g} s")
                    elif now - ready_at > self._limits.wall_s:
                        stopped = "time"
                    else:
                        stopped = self._find_excess()
        wall_s = time.monotonic() - (ready_at or began)
        self.end()
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            size += _drain(pipe.fileno(), output[name], self._limits.output_bytes + 65536)
        while data := os.read(self._status, 65536):
            status += data
        texts = {name: b"".join(parts)[: self._limits.output_bytes] for name, parts in output.items()}
        state, _, exit_code = status.decode(errors="replace").partition("\n")
        if state != "ready":
            words = state.removeprefix("ready: ") or texts["stderr"].decode(errors="replace").strip()[-500:]
            words = words or f"exit code {exit_code or self._process.returncode}"
            raise SandboxError(f"the sandbox ({self._isolation}) did not start the program: {words}")
        if not exit_code.isdecimal() or self._process.returncode:
            ended = f"its watching process ended with status {self._process.returncode}"
            raise SandboxError(
                f"the sandbox ({self._isolation}) broke: {ended if self._process.returncode else exit_code}"
            )
        code = int(exit_code)
        if not stopped and size > self._limits.output_bytes:
            stopped = "output"
        if not stopped and code == 128 + signal.SIGXCPU:
            stopped = "cpu"
        return ProgramRun(
            exit_code=code,
            stdout=texts["stdout"].decode(errors="replace"),
            stderr=texts["stderr"].decode(errors="replace"),
            stopped=stopped,  # type: ignore[arg-type]
            wall_s=wall_s,
        )

    def end(self) -> None:
        """Kill what is left of the program and wait until all of its processes are dead."""
        if self._ended:
            return
        self._ended = True
        self._control.close()
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        exits = select.poll()
        exits.register(self._exit, select.POLLIN)
        if not exits.poll(END_S * 1000):
            raise SandboxError(f"processes of a sandbox were still there {END_S:g} s after they were killed")
        self._process.wait()

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
        self._fds.close()

    def _find_excess(self) -> str:
        """Return the limit that the processes together exceed, or ""."""
        pids = _find_descendants(self._process.pid)
        pids = pids[2:] if self._isolation == "bubblewrap" else pids  # without bwrap and its first process
        ticks, memory, threads = 0, 0, 0
        for pid in pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
            threads += int(fields[17])
            memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        if ticks / os.sysconf("SC_CLK_TCK") > self._limits.cpu_s:
            return "cpu"
        if memory > self._limits.memory_bytes and sum(map(_measure_memory, pids)) > self._limits.memory_bytes:
            return "memory"
        if threads > self._limits.processes:
            return "processes"
        return "disk" if self._uses_too_much_disk(pids) else ""

    def _uses_too_much_disk(self, pids: list[int]) -> bool:
        if self._folder is None:
            for pid in pids:
                with contextlib.suppress(OSError):
                    usage = os.statvfs(f"/proc/{pid}/root{FOLDER}")
                    return usage.f_files - usage.f_ffree > self._limits.files
            return False
        if time.monotonic() < self._next_check:
            return False
        began = time.monotonic()
        exceeds = _holds_too_much(self._folder, self._limits)
        now = time.monotonic()
        self._next_check = now + 10 * (now - began)  # a folder with many files takes a while
        return exceeds


def _holds_too_much(folder: str, limits: Limits) -> bool:
    """Return whether the files in a folder exceed the limits. The program goes on changing them, so any
    file may vanish meanwhile."""
    size, number, folders = 0, 0, [folder]
    for path in folders:
        if len(path) > MAX_PATH:
            return True
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                number += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if size > limits.disk_bytes or number > limits.files:
                    return True
    return False


def find_working(
    kinds: Sequence[Isolation],
    *,
    limits: Limits | None = None,
    python: Path | str | None = None,
    readable: Sequence[Path | str] = (),
) -> tuple[Sandbox | None, list[str]]:
    """Return a sandbox of the first kind that holds on this host, or None, and what was wrong with each kind before it."""
    chosen = [Path(python)] if python else [Path(os.path.realpath(sys.executable)), Path("/usr/bin/python3")]
    problems = []
    for isolation in kinds:
        for interpreter in chosen:
            try:
                paths = [*_find_prefixes(interpreter), *(os.path.realpath(path) for path in readable)]
                sandbox = Sandbox(isolation, limits=limits or Limits(), python=interpreter, readable=paths)
                _probe(sandbox)
            except SandboxError as error:
                problems.append(f"{isolation} with {interpreter}: {error}")
            else:
                return sandbox, problems
    return None, problems


PROBE = """
import json, os, socket, subprocess, sys, time
asked = json.loads(sys.stdin.read())
broken = []
def attempt(name, action):
    try:
        if action() is not False:
            broken.append(name)
    except Exception:
        pass
def threads():
    children = []
    try:
        for _ in range(asked["processes"] + 8):
            child = os.fork()
            if not child:
                time.sleep(60)
            children.append(child)
        return True
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
def memory():
    return bool(bytearray(asked["memory"]))
def environment():
    return asked["secret"] in open(f"/proc/{asked['parent']}/environ", errors="replace").read()
attempt("reads a file of the worker", lambda: open(asked["file"]).read() == asked["secret"])
attempt("reads the worker's environment", environment)
attempt("reads the worker's memory", lambda: open(f"/proc/{asked['parent']}/mem", "rb") and True)
attempt("signals the worker", lambda: os.kill(asked["parent"], 0))
attempt("writes elsewhere", lambda: open(asked["file"] + ".written", "w"))
attempt("connects to the worker", lambda: socket.create_connection(("127.0.0.1", asked["port"]), 2))
attempt("takes more memory than its limit", memory)
attempt("has an environment of the worker", lambda: asked["secret"] in str(os.environ))
if asked["counts_processes"]:
    attempt("starts more processes than its limit", threads)
def large():
    with open("large", "wb", buffering=0) as file:
        file.write(b"0" * (asked["file_size"] + 1))
        file.write(b"0")
    return os.path.getsize("large") > asked["file_size"]
attempt("writes a larger file than its limit", large)
attempt("becomes root", lambda: os.setuid(0))
open("own", "w").write("x")
assert subprocess.run(["/bin/sh", "-c", "exit 7"]).returncode == 7
print(json.dumps(broken))
"""
WEAK_POINTS = {"reads a file of the worker", "reads the worker's environment", "reads the worker's memory", "signals the worker",
               "writes elsewhere", "connects to the worker"}  # fmt: skip
"""Findings of the probe that do not rule out the isolation `rlimits`, because limits alone may not prevent them."""


def _probe(sandbox: Sandbox) -> None:
    """Raise SandboxError unless this sandbox stops a hostile program and runs a harmless one."""
    secret = f"secret-{random.getrandbits(64):x}"
    limits = msgspec.structs.replace(
        sandbox.limits, wall_s=30.0, cpu_s=30.0, memory_bytes=256 * MIB, processes=8, file_bytes=MIB, disk_bytes=8 * MIB
    )
    probed = Sandbox(sandbox.isolation, limits=limits, python=sandbox.python, readable=sandbox._readable)  # noqa: SLF001
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        Path(folder).chmod(0o777)
        Path(folder, "secret").write_text(secret)
        asked = {
            "file": str(Path(folder, "secret")),
            "secret": secret,
            "parent": os.getpid(),
            "port": server.getsockname()[1],
            "processes": limits.processes,
            "memory": limits.memory_bytes + MIB,
            "file_size": limits.file_bytes,
            # Without a user or namespace of its own the kernel cannot count them; the watching thread does.
            "counts_processes": os.geteuid() == 0 or sandbox.isolation == "bubblewrap",
        }
        run = probed.run(["python", "-I", "-c", PROBE], stdin=json.dumps(asked))
        if run.problem:
            raise SandboxError(f"the probe failed: {run.problem}")
        broken = set(json.loads(run.stdout)) | (
            {"writes elsewhere"} if Path(folder, "secret.written").exists() else set()
        )
    if broken - (WEAK_POINTS if sandbox.isolation == "rlimits" else set()):
        raise SandboxError(f"a hostile program {', '.join(sorted(broken))}")


def _find_prefixes(python: Path) -> list[str]:
    """Return the folders that an interpreter needs, the system's included."""
    ask = "import sys; print('\\n'.join({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}))"
    try:
        asked = subprocess.run(
            [python, "-I", "-S", "-c", ask], capture_output=True, text=True, check=True, timeout=START_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{python} cannot be run: {error}") from error
    own = [path for path in asked.stdout.split("\n") if path and not path.startswith("/usr")]
    if "/" in own:
        raise SandboxError(f"{python} is installed in /, which would make all files readable")
    return [*SYSTEM, *own]


def _pick_uid() -> int:
    """Return a user id that nobody has, of those that this container may use."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, number = max(ranges, key=lambda entry: entry[0] + entry[2])
    last = min(first + number, 2**31) - 2  # the last may be the overflow id
    return random.randint(max(first, last - 2**30, 20_000 if last > 40_000 else 1_001), last)


def _make_folder() -> tuple[str, int]:
    """Return a new folder, and a file descriptor that locks it: a folder without a lock is abandoned."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        if (lock := _lock_folder(folder)) is not None:
            return folder, lock


def _lock_folder(folder: str) -> int | None:
    """Lock a folder and return the file descriptor that holds the lock; None if another process has locked the folder, or if this
    process cannot open it."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(folder).stat()  # it may have been removed before the lock
    except OSError:
        os.close(lock)
        return None
    return lock


def remove_abandoned_folders() -> None:
    """Remove folders of sandboxes whose launching process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (lock := _lock_folder(str(folder))) is not None:
            remove_folder(str(folder))
            os.close(lock)


def _make_pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Return both ends of a pipe, each closed by its stack."""
    read, write = os.pipe()
    reading.callback(os.close, read)
    writing.callback(os.close, write)
    return read, write


def _drain(fd: int, parts: list[bytes], most: int) -> int:
    """Append what is left in a pipe whose writers are dead to `parts`, and return the number of bytes. Reading ends soon after
    `most` bytes."""
    size = 0
    while size <= most and (data := os.read(fd, 65536)):
        parts.append(data)
        size += len(data)
    return size


def _find_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_bytes().split())
    return found


def _find_descendants(pid: int) -> list[int]:
    """Return all processes below a process, parents before children."""
    found = _find_children(pid)
    for child in found:
        found += _find_children(child)
    return found


def _measure_memory(pid: int) -> int:
    """Return the memory of a process, in which a page that n processes share counts 1/n."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)
