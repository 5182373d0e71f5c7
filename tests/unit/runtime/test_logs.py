"""Whoever says something lives on, and ends as it would have, where its words find no room."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from swarmq.runtime.logs import log, redirect_to

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no file that is always full")
LOGGING = """
import sys
from swarmq.runtime import logs
logs.configure(role="learner", run="r")
import structlog
for _ in range(200):
    structlog.get_logger().warning("disk_full", what="x" * 100)
"""
DAEMON = f"""{LOGGING}
print("out"), print("err", file=sys.stderr)
"""
CLIENT = """
from swarmq.runtime.logs import log
log.warning("outage", what="no broker")
"""


def status(program: str) -> int:
    """Of a process whose output goes to a full disk."""
    with FULL.open("wb") as full:
        return subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, check=False).returncode


@pytest.mark.parametrize(
    ("end", "expected"),
    [("", 0), ("sys.exit(3)", 3), ("sys.exit('swarmq: rank 0: a reason')", 1), ("raise RuntimeError", 1)],
)
def test_a_daemon_whose_log_is_on_a_full_disk_ends_with_the_status_that_it_has_elsewhere(
    end: str, expected: int
) -> None:
    assert status(DAEMON + end) == expected


def test_a_client_goes_on_after_a_line_that_finds_no_room() -> None:
    assert status(CLIENT + "import os\nos._exit(7)") == 7


def test_lines_are_whole_and_in_order_where_there_is_room(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as sink:
        subprocess.run([sys.executable, "-c", DAEMON], stdout=sink, stderr=sink, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert ["out" in line or "err" in line or line.endswith('Z"}') for line in lines] == [True] * 202


@pytest.mark.parametrize(
    "program",
    [LOGGING, f"import swarmq.runtime.logs\nswarmq.runtime.logs.write_lines_whole(){CLIENT}"],
    ids=["daemon", "worker"],
)
def test_a_line_is_written_at_one_go_though_nothing_is_buffered(program: str) -> None:
    """Or lines of other processes that write to the same place could get into its middle."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=theirs, stderr=theirs)
        theirs.close()
        pieces = []
        while piece := ours.recv(1 << 16):
            pieces.append(piece)
        assert process.wait() == 0
    assert pieces
    assert all(piece.endswith(b"\n") and piece.count(b"\n") == 1 and b"warning" in piece for piece in pieces)


def test_a_command_that_talks_to_a_person_says_its_log_in_the_same_words(capfd: pytest.CaptureFixture[str]) -> None:
    before, lines = structlog.get_config(), list[str]()
    with redirect_to(lines.append):
        log.info("started_again", part="the broker")
        structlog.get_logger().warning("events_not_recorded", path="runs/a", error="no space")
    assert lines == ["started again: part the broker", "warning: events not recorded: path runs/a, error no space"]
    assert capfd.readouterr() == ("", ""), "and nowhere else"
    assert structlog.get_config() == before
