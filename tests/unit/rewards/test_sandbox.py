"""Hostile programs, run for real in every isolation that this host has."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarmq.client.runners.worker import load_target
from swarmq.errors import SandboxError, TaskError
from swarmq.rewards import Limits, Sandbox
from swarmq.rewards.sandbox import FOLDER, MIB, PREFIX, find_working, remove_abandoned_folders

LIMITS = Limits(
    wall_s=20, cpu_s=15, memory_bytes=128 * MIB, processes=8, output_bytes=100_000, file_bytes=MIB, disk_bytes=4 * MIB
)


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request):
    found, problems = find_working((request.param,), limits=LIMITS)
    if not found:
        pytest.skip(f"this host cannot: {problems}")
    return found


@pytest.fixture(scope="module")
def weak():
    """Limits alone."""
    found, problems = find_working(("rlimits",), limits=LIMITS)
    assert found, problems
    return found


def run(sandbox, code, stdin="", **limits):
    return sandbox.with_limits(**limits).run(["python", "main.py"], files={"main.py": code}, stdin=stdin)


def find_marked(marker):
    """Return the processes whose command line has the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_a_harmless_program_reads_and_writes(sandbox):
    ran = run(
        sandbox, "import sys; name = input(); open('x', 'w').write(name); print(open('x').read()); sys.exit(3)", "Ada\n"
    )
    assert (ran.stdout, ran.exit_code, ran.stopped) == ("Ada\n", 3, "")
    assert ran.problem == "exit code 3"


def test_a_traceback_is_the_reason(sandbox):
    assert run(sandbox, "1 / 0").problem == "exit code 1: ZeroDivisionError: division by zero"


def test_files_lie_in_folders_and_stay_inside(sandbox):
    assert sandbox.run(["python", "a/b.py"], files={"a/b.py": "print(1)"}).stdout == "1\n"
    for name in ("../x", "/etc/x", ""):
        with pytest.raises(SandboxError, match="files names"):
            sandbox.run(["python"], files={name: ""})


def test_a_program_that_is_not_there_is_a_failure_of_the_sandbox(sandbox):
    with pytest.raises(SandboxError, match="did not start the program"):
        sandbox.run(["/no/such/program"])


def test_a_long_sleep_ends(sandbox):
    assert run(sandbox, "import time; time.sleep(1000)", wall_s=0.3).stopped == "time"


def test_an_endless_loop_ends_also_if_it_ignores_signals(sandbox):
    code = "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except Exception: pass\nwhile True: pass"
    assert run(sandbox, code, cpu_s=0.5).stopped == "cpu"


def test_processor_time_of_children_counts(sandbox):
    code = "import os\nwhile True:\n  if not os.fork():\n    for _ in range(10**6): pass\n    os._exit(0)\n  os.wait()"
    assert run(sandbox, code, cpu_s=0.5).stopped == "cpu"


def test_a_fork_bomb_is_bounded_and_nothing_of_it_is_left(sandbox):
    marker = f"bomb{os.getpid()}x{time.monotonic_ns()}"
    code = f"'{marker}'\nimport os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    ran = sandbox.with_limits(wall_s=1, cpu_s=10).run(["python", "-c", code])
    assert ran.stopped in ("time", "processes")
    assert find_marked(marker) == []


def test_a_daemon_is_not_left_behind(sandbox):
    marker = f"daemon{os.getpid()}x{time.monotonic_ns()}"
    code = f"'{marker}'\nimport os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nprint('alive', flush=True)\ntime.sleep(600)"
    ran = sandbox.run(["python", "-c", f"{code!s}"])
    assert ran.exit_code == 0
    assert find_marked(marker) == []


def test_a_daemon_that_detached_does_not_prolong_the_run(sandbox):
    began = time.monotonic()
    code = "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(600)\nprint('done')"
    assert run(sandbox, code).stdout == "done\n"
    assert time.monotonic() - began < 10


def test_a_memory_bomb_hits_the_limit(sandbox):
    ran = run(sandbox, "x = []\nwhile True: x.append(bytearray(10**6))")
    assert "MemoryError" in ran.stderr or ran.stopped == "memory" or ran.exit_code == 137


def test_memory_of_all_processes_together_is_limited(sandbox):
    code = "import os, time\nfor _ in range(5):\n  if not os.fork():\n    x = b'x' * 50_000_000\n    time.sleep(60)\ntime.sleep(60)"
    assert run(sandbox, code).stopped == "memory"


def test_endless_output_is_cut_and_its_beginning_kept(sandbox):
    ran = run(sandbox, "while True: print('x' * 10000)")
    assert ran.stopped == "output"
    assert ran.stdout == ("x" * 10000 + "\n") * 9 + "x" * (LIMITS.output_bytes - 90009)
    assert run(sandbox, "import sys\nwhile True: sys.stderr.write('x' * 10000)").stopped == "output"


def test_output_that_is_no_text_is_kept_as_far_as_it_goes(sandbox):
    assert run(sandbox, "import os; os.write(1, b'a\\xff\\x00b')").stdout == "a\ufffd\x00b"


def test_large_and_many_files_are_refused(sandbox):
    ran = run(sandbox, "open('x', 'wb').write(b'0' * 3_000_000)")
    assert "File too large" in ran.stderr
    many = "n = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb').write(b'0' * 900_000)"
    ran = run(sandbox, many)
    assert ran.stopped == "disk" or "No space left" in ran.stderr


def test_many_empty_files_are_refused(sandbox):
    ran = run(sandbox, "n = 0\nwhile True:\n  n += 1\n  open(str(n), 'w').close()", files=300)
    assert ran.stopped == "disk"


def test_deep_folders_links_and_modes_do_not_hinder_the_removal(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")  # disks take seconds to remove 1300 folders
    kept = tmp_path / "kept"
    kept.write_text("kept")
    tmp_path.chmod(0o777)
    code = f"""
import os
os.symlink({str(tmp_path)!r}, "link")
os.symlink("/", "root")
os.mkdir("closed"); open("closed/x", "w").close()
try: os.chmod("closed", 0)
except OSError: pass
print("made", os.getcwd(), flush=True)
for _ in range(1300):
    os.mkdir("d"); os.chdir("d")
"""
    made, folder = run(sandbox, code).stdout.split()
    assert made == "made"
    assert kept.read_text() == "kept"
    assert folder == FOLDER or not Path(folder).exists()


def test_a_program_may_delete_its_own_folder(sandbox):
    code = "import shutil, os; shutil.rmtree(os.getcwd(), ignore_errors=True); print('gone')"
    assert run(sandbox, code).stdout == "gone\n"


def test_nothing_outside_is_read_written_or_signalled(sandbox, tmp_path):
    secret = tmp_path / "answer"
    secret.write_text("the answer is 42")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        with contextlib.suppress(PermissionError):  # of another user
            folder.chmod(folder.stat().st_mode | 0o005)
    os.environ["SWARMQ_TEST_SECRET"] = "the answer is 42"
    code = f"""
import os, glob
for name in ["/proc/{os.getpid()}/environ", "/proc/{os.getpid()}/cmdline", "/proc/{os.getpid()}/mem", "/etc/passwd", "/etc/shadow",
             {str(secret)!r}, "/root/.bashrc", {str(Path(__file__))!r}, *glob.glob("/proc/[0-9]*/environ")]:
    try: print(open(name, errors="replace").read(4000))
    except OSError: pass
os.symlink({str(secret)!r}, "link")
try: print(open("link").read())
except OSError: pass
for attempt in (lambda: os.kill({os.getpid()}, 9), lambda: os.kill(-1, 0) if os.getppid() == {os.getpid()} else None,
                lambda: open({str(tmp_path / "written")!r}, "w"), lambda: os.rename("link", {str(tmp_path / "moved")!r}),
                lambda: open("/usr/bin/true", "r+b"), lambda: os.unlink({str(secret)!r}), lambda: os.truncate({str(secret)!r}, 0)):
    try: attempt()
    except OSError: pass
print(dict(os.environ))
"""
    ran = run(sandbox, code)
    del os.environ["SWARMQ_TEST_SECRET"]
    assert ran.problem == ""
    assert "42" not in ran.stdout
    assert "root:" not in ran.stdout
    assert "HOME" in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["answer"]
    assert secret.read_text() == "the answer is 42"


def test_there_is_no_network(sandbox):
    attempts = """
import socket
def connect(): socket.create_connection(("127.0.0.1", PORT), 3)
def connect_out(): socket.create_connection(("1.1.1.1", 53), 3)
def reach_the_host(): socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
def configure(): socket.socket(16, socket.SOCK_RAW).bind((0, 0)) or 1 / 0
def resolve(): socket.getaddrinfo("example.com", 80)
for attempt in (connect, connect_out, reach_the_host, configure, resolve):
    try: attempt(); print(attempt.__name__)
    except Exception: pass
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = run(sandbox, f"PORT = {server.getsockname()[1]}{attempts}print('tried')")
    assert ran.stdout == "tried\n"


def test_system_calls_that_lead_outside_are_refused(sandbox):
    calls = ("ptrace(0, 0, 0, 0)", "unshare(0x10000000)", "syscall(425, 8, buffer)", "memfd_create(b'x', 0)",
             "mount(b'none', b'/', b'tmpfs', 0, None)", "setns(0, 0)", "setuid(0)", "chroot(b'/')")  # fmt: skip
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nbuffer = ctypes.create_string_buffer(200)\n"
    ran = run(sandbox, code + "".join(f"print(libc.{call}, ctypes.get_errno())\n" for call in calls))
    refused = dict(zip(calls, ran.stdout.splitlines(), strict=True))
    assert refused.pop("setuid(0)") in ("-1 1", "-1 22")  # without a root user there is no such id
    assert set(refused.values()) == {"-1 1"}


def test_sandboxes_do_not_see_each_other(sandbox):
    code = "import os, time, glob; open('mine', 'w').close(); time.sleep(0.4); print(sorted(os.listdir('.')))"
    with ThreadPoolExecutor(3) as pool:
        ran = list(pool.map(lambda _: run(sandbox, code), range(3)))
    assert [one.stdout for one in ran] == ["['main.py', 'mine']\n"] * 3


def test_many_threads_and_coroutines_share_a_sandbox(sandbox):
    async def together():
        return await asyncio.gather(*(sandbox.arun(["python", "-c", f"print({n})"]) for n in range(8)))

    assert [ran.stdout for ran in asyncio.run(together())] == [f"{n}\n" for n in range(8)]


def count_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_descriptor_and_no_folder_is_lost(sandbox):
    run(sandbox, "1 / 0")
    before = count_fds(), threading.active_count()
    for code in ("print(1)", "import time; time.sleep(60)", "while True: print('x' * 10000)"):
        run(sandbox, code, wall_s=0.5)
    assert (count_fds(), threading.active_count()) == before


@pytest.fixture
def temporary():
    """A folder for temporary files, which all users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_program_and_folder_go_with_a_worker_that_is_killed(sandbox, temporary):
    marker = f"orphan{os.getpid()}x{time.monotonic_ns()}"
    worker = f"""
from swarmq.rewards.sandbox import find_working
sandbox, _ = find_working(({sandbox.isolation!r},))
marker = {marker[:6]!r} + {marker[6:]!r}  # whole in the command line of the program alone
sandbox.with_limits(wall_s=300).run(["python", "-c", f"'{{marker}}'; import time; time.sleep(300)"])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", worker], env=environment)
    try:
        wait_until(lambda: find_marked(marker))
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not find_marked(marker))
    wait_until(lambda: list(temporary.iterdir()) == [])


def find_below(pid):
    """Return all processes below a process, zombies included."""
    below = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            below += [child, *find_below(child)]
    return below


@pytest.fixture
def find_new():
    """Return a function that finds processes of the test; orphans come to this process, and stay zombies if nobody reaps them."""
    subreaper = 36
    before = set(find_below(os.getpid()))
    ctypes.CDLL(None).prctl(subreaper, 1, 0, 0, 0)
    yield lambda: [pid for pid in find_below(os.getpid()) if pid not in before]
    ctypes.CDLL(None).prctl(subreaper, 0, 0, 0, 0)


def test_neither_zombies_nor_orphans_are_left(sandbox, find_new):
    assert run(sandbox, "print(1)").stdout == "1\n"
    assert run(sandbox, "import os, time\nif not os.fork(): time.sleep(60)\nos.kill(os.getpid(), 9)").exit_code == 137
    assert run(sandbox, "import time\ntime.sleep(60)", wall_s=0.2).stopped == "time"
    assert find_new() == []


@pytest.mark.parametrize("victim", ["bwrap", "sandbox_launch.py"])
def test_a_sandbox_that_is_killed_fails_and_leaves_no_process(sandbox, find_new, victim):
    if victim == "bwrap" and sandbox.isolation != "bubblewrap":
        pytest.skip("has no bwrap")
    marker = f"killed{os.getpid()}x{time.monotonic_ns()}"
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(sandbox.run, ["python", "-c", f"'{marker}'; import time; time.sleep(60)"])
        wait_until(lambda: find_marked(marker))
        os.kill(next(pid for pid in find_new() if victim in Path(f"/proc/{pid}/cmdline").read_text()), signal.SIGKILL)
        said = "bwrap was ended by signal 9" if victim == "bwrap" else "its watching process ended with status -9"
        with pytest.raises(SandboxError, match=f"broke: {said}"):
            ran.result()

    def reap():
        for pid in find_new():
            with contextlib.suppress(ChildProcessError):  # not yet an orphan
                os.waitpid(pid, os.WNOHANG)

    if victim == "sandbox_launch.py":  # which reaps the others, as long as it lives
        wait_until(lambda: reap() or not find_new())
    assert find_new() == []
    assert find_marked(marker) == []


def test_folders_of_a_launcher_that_was_killed_are_removed_at_the_next_start(weak, temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    abandoned, foreign = temporary / f"{PREFIX}abandoned", temporary / "other"
    for folder in (abandoned, foreign):
        (folder / "deep").mkdir(parents=True)
    with weak.start(["python", "-c", "import time; time.sleep(60)"]):
        (used,) = set(temporary.iterdir()) - {abandoned, foreign}
        remove_abandoned_folders()
        assert set(temporary.iterdir()) == {used, foreign}
    assert set(temporary.iterdir()) == {foreign}


def wait_until(fact, deadline_s=60):
    end = time.monotonic() + deadline_s
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_limits_alone_still_limit(weak):
    assert run(weak, "print(6 * 7)").stdout == "42\n"
    assert run(weak, "while True: pass", cpu_s=0.5).stopped == "cpu"
    marker = f"weak{os.getpid()}x{time.monotonic_ns()}"
    code = f"'{marker}'\nimport os\nwhile True:\n  try: os.fork(); os.setsid()\n  except OSError: pass"
    assert weak.with_limits(wall_s=1).run(["python", "-c", code]).stopped in ("time", "processes")
    assert find_marked(marker) == []


def test_detect_names_what_it_chose_and_says_why_there_is_none():
    found = Sandbox.detect(allow_weak=True)
    assert found.isolation in ("bubblewrap", "landlock", "rlimits")
    with pytest.raises(SandboxError, match=r"no sandbox holds.*cannot be run.*apt-get install bubblewrap"):
        Sandbox.detect(python="/no/python")


def test_a_worker_whose_agent_finds_no_sandbox_is_refused_at_its_start(tmp_path, monkeypatch):
    (tmp_path / "agent_in_a_sandbox.py").write_text(
        "from swarmq.rewards import Sandbox\nsandbox = Sandbox.detect(python='/no/python')\ndef attempt(ep): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        TaskError, match=r"importing agent_in_a_sandbox failed: SandboxError: no sandbox holds on this host: "
    ):
        load_target("agent_in_a_sandbox:attempt")


def test_a_missing_bwrap_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    sandbox, problems = find_working(("bubblewrap",))
    assert sandbox is None
    assert all(problem.endswith("bwrap is not installed") for problem in problems)


def test_limits_are_checked():
    with pytest.raises(SandboxError, match="limits.wall_s is 0"):
        Limits(wall_s=0)
    with pytest.raises(SandboxError, match="Python itself needs"):
        Limits(memory_bytes=1000)
