"""The demo tells the address of its dashboard, and goes on without one that does not start."""

from __future__ import annotations

import asyncio
import re
import sys
import urllib.request
from pathlib import Path

import pytest

from swarmq.config import RunFolder
from swarmq.demo.dashboard import serve_dashboard

SERVER = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(f"http://127.0.0.1:{server.server_port}/#token=t", flush=True)
server.serve_forever()
"""


async def announced(lines: list[str]) -> str:
    async with asyncio.timeout(60):
        while not lines:  # noqa: ASYNC110 - a process of its own
            await asyncio.sleep(0.01)
    return lines[0]


async def test_the_address_is_told_when_it_answers_and_the_process_ends_with_the_demo(tmp_path: Path) -> None:
    lines: list[str] = []
    async with serve_dashboard(RunFolder(tmp_path), lines.append, command=(sys.executable, "-c", SERVER)):
        [url] = re.findall(r"^dashboard: (http://127\.0\.0\.1:\d+/)#token=t$", await announced(lines))
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=30) as answer:
            assert answer.status == 200
    assert len(lines) == 1
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(urllib.request.urlopen, url, timeout=30)


async def test_a_dashboard_that_does_not_start_is_told_and_does_not_end_the_demo(tmp_path: Path) -> None:
    lines: list[str] = []
    command = (sys.executable, "-c", "raise SystemExit('no such extra')")
    async with serve_dashboard(RunFolder(tmp_path), lines.append, command=command):
        assert str(tmp_path / "logs" / "dashboard.log") in await announced(lines)
    assert "no such extra" in (tmp_path / "logs" / "dashboard.log").read_text()
