"""Hostile programs, run for real in every isolation that this host has."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarmq.errors import SandboxError
from swarmq.rewards import Limits, Sandbox
from swarmq.rewards.sandbox import FOLDER, MIB, find_working

LIMITS = Limits(
    wall_s=20, cpu_s=15, memory_bytes=128 * MIB, processes=8, output_bytes=100_000, file_bytes=MIB, disk_bytes=4 * MIB
)


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request):
    found, problems = find_working((request.param,), limits=LIMITS)
    if not found:
        pytest.skip(f"this host cannot: {problems}")
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
    ran = run(sandbox, "import time; print('on', flush=True); time.sleep(1000)", wall_s=0.5)
    assert (ran.stopped, ran.stdout) == ("time", "on\n")


def test_an_endless_loop_ends_also_if_it_ignores_signals(sandbox):
    code = "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except Exception: pass\nwhile True: pass"
    assert run(sandbox, code, cpu_s=1).stopped == "cpu"


def test_processor_time_of_children_counts(sandbox):
    code = "import os\nwhile True:\n  if not os.fork():\n    for _ in range(10**6): pass\n    os._exit(0)\n  os.wait()"
    assert run(sandbox, code, cpu_s=1).stopped == "cpu"


def test_a_fork_bomb_is_bounded_and_nothing_of_it_is_left(sandbox):
    marker = f"bomb{os.getpid()}x{time.monotonic_ns()}"
    code = f"'{marker}'\nimport os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    ran = sandbox.with_limits(wall_s=1.5, cpu_s=10).run(["python", "-c", code])
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


def test_endless_output_is_cut(sandbox):
    ran = run(sandbox, "while True: print('x' * 10000)")
    assert ran.stopped == "output"
    assert len(ran.stdout) <= LIMITS.output_bytes
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


def test_deep_folders_links_and_modes_do_not_hinder_the_removal(sandbox, tmp_path):
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


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('127.0.0.1', PORT), 3)", "socket.create_connection(('1.1.1.1', 53), 3)",
        "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)", "socket.socket(16, socket.SOCK_RAW).bind((0, 0)) or 1 / 0",
        "socket.getaddrinfo('example.com', 80)",
    ],
)  # fmt: skip
def test_there_is_no_network(sandbox, attempt):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nPORT = {server.getsockname()[1]}\ntry:\n  {attempt}\n  print('connected')\nexcept Exception: print('refused')"
        assert run(sandbox, code).stdout == "refused\n"


@pytest.mark.parametrize(
    "call", ["libc.ptrace(0, 0, 0, 0)", "libc.unshare(0x10000000)", "libc.syscall(425, 8, buffer)", "libc.memfd_create(b'x', 0)",
             "libc.mount(b'none', b'/', b'tmpfs', 0, None)", "libc.setns(0, 0)", "libc.setuid(0)", "libc.chroot(b'/')"],
)  # fmt: skip
def test_system_calls_that_lead_outside_are_refused(sandbox, call):
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nbuffer = ctypes.create_string_buffer(200)\nprint({call}, ctypes.get_errno())"
    assert run(sandbox, code).stdout in ("-1 1\n", "-1 22\n" if "setuid" in call else "")


def test_sandboxes_do_not_see_each_other(sandbox):
    code = "import os, time, glob; open('mine', 'w').close(); time.sleep(1); print(sorted(os.listdir('.')))"
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


def test_the_program_dies_with_the_worker(sandbox, tmp_path):
    import signal
    import subprocess

    marker = f"orphan{os.getpid()}x{time.monotonic_ns()}"
    worker = f"""
from swarmq.rewards.sandbox import find_working
sandbox, _ = find_working(({sandbox.isolation!r},))
sandbox.with_limits(wall_s=300).run(["python", "-c", "'{marker}'; import time; time.sleep(300)"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", worker], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        wait_until(
            lambda: (
                len(find_marked(marker)) >= 2
                and any(
                    b"import time" in Path("/proc", pid, "cmdline").read_bytes()
                    for pid in find_marked(marker)
                    if pid != str(process.pid)
                )
            )
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not find_marked(marker))


def wait_until(fact, deadline_s=60):
    end = time.monotonic() + deadline_s
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_limits_alone_must_be_allowed_and_then_still_limit():
    weak, problems = find_working(("rlimits",), limits=LIMITS)
    assert weak, problems
    assert run(weak, "print(6 * 7)").stdout == "42\n"
    assert run(weak, "while True: pass", cpu_s=1).stopped == "cpu"
    marker = f"weak{os.getpid()}x{time.monotonic_ns()}"
    code = f"'{marker}'\nimport os\nwhile True:\n  try: os.fork(); os.setsid()\n  except OSError: pass"
    assert weak.with_limits(wall_s=1).run(["python", "-c", code]).stopped in ("time", "processes")
    assert find_marked(marker) == []


def test_detect_names_what_it_chose_and_says_why_there_is_none(sandbox, monkeypatch):
    found = Sandbox.detect(allow_weak=True)
    assert found.isolation in ("bubblewrap", "landlock", "rlimits")
    with pytest.raises(SandboxError, match=r"no sandbox holds.*cannot be run.*apt-get install bubblewrap"):
        Sandbox.detect(python="/no/python")


def test_limits_are_checked():
    with pytest.raises(SandboxError, match="limits.wall_s is 0"):
        Limits(wall_s=0)
    with pytest.raises(SandboxError, match="Python itself needs"):
        Limits(memory_bytes=1000)
