import asyncio
import os
import sys
from pathlib import Path

import pytest

from swarmq.black_box.process import OutputLog, run_command
from swarmq.runtime.processes import is_alive

MARK = "SWARMQ_EPISODE=e-of-test-process"


async def run(tmp_path, code, *, stdin=None, timeout_s=60.0, limit=10_000):
    log = OutputLog(tmp_path / "out.log", limit=limit)
    name, _, value = MARK.partition("=")
    source = None if stdin is None else tmp_path / "in"
    if source:
        source.write_bytes(stdin)
    try:
        return await run_command(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            environment={**os.environ, name: value},
            mark=MARK,
            stdin=source,
            log=log,
            timeout_s=timeout_s,
        )
    finally:
        log.close()


async def test_the_end_of_a_command_is_reported_with_its_last_output(tmp_path):
    code = "import sys; print(sys.stdin.read()); print('oh', file=sys.stderr); sys.exit(3)"
    done = await run(tmp_path, code, stdin=b"prompt")
    assert done.exit_code == 3
    assert {"prompt", "oh"} <= set(done.tail.split())
    assert "prompt" in (tmp_path / "out.log").read_text()


async def test_a_command_that_does_not_read_its_input_ends_well(tmp_path):
    assert (await run(tmp_path, "pass", stdin=b"x" * 1_000_000)).exit_code == 0


async def test_a_killed_command_has_the_signal(tmp_path):
    assert (await run(tmp_path, "import os; os.kill(os.getpid(), 11)")).exit_code == -11


async def test_a_command_without_end_is_killed(tmp_path):
    done = await run(tmp_path, "print('begun', flush=True)\nimport time; time.sleep(600)", timeout_s=2.0)
    assert done.exit_code is None
    assert done.seconds < 60


LEAVES = """
import subprocess, sys
for session in (False, True):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
    print(child.pid, flush=True)
"""


async def test_no_process_that_a_command_started_outlives_it(tmp_path):
    """Also one in a session of its own, which holds the pipe of the output open."""
    done = await run(tmp_path, LEAVES)
    assert done.exit_code == 0
    assert [is_alive(int(pid)) for pid in done.tail.split()] == [False, False]


async def test_a_cancelled_run_leaves_no_process(tmp_path):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'ready'); time.sleep(600)"
    running = asyncio.create_task(run(tmp_path, code))
    async with asyncio.timeout(60):
        while not (tmp_path / "ready").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_alive(int((tmp_path / "ready").read_text()))


async def test_a_command_that_is_not_there_raises(tmp_path):
    log = OutputLog(tmp_path / "out.log", limit=100)
    with pytest.raises(FileNotFoundError):
        await run_command(
            ["no-such-program"], cwd=tmp_path, environment={}, mark=MARK, stdin=None, log=log, timeout_s=1.0
        )
    log.close()


def test_a_log_keeps_beginning_and_end_within_its_limit(tmp_path):
    log = OutputLog(tmp_path / "logs/out.log", limit=2000)
    for number in range(10_000):
        log.write(f"{number}\n".encode())
    log.close()
    text = Path(log.path).read_text()
    assert text.startswith("0\n1\n2\n")
    assert text.endswith("9998\n9999\n")
    assert "bytes left out (--log-limit)" in text
    assert len(text) < 2200


def test_a_short_output_is_kept_whole(tmp_path):
    log = OutputLog(tmp_path / "out.log", limit=1000)
    for piece in (b"a" * 400, b"b" * 400, b"c" * 100):
        log.write(piece)
    log.close()
    assert log.path.read_bytes() == b"a" * 400 + b"b" * 400 + b"c" * 100
