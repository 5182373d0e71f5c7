"""The page of metrics that collector and learner serve."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request

import pytest

from swarmq.errors import CollectorError
from swarmq.runtime.logs import redirect_to
from swarmq.runtime.metrics_page import serve_metrics
from swarmq.runtime.processes import reserve_port


def get(url: str, *, method: str = "GET") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


async def test_the_page_is_served_and_nothing_else() -> None:
    port = reserve_port()
    async with serve_metrics("127.0.0.1", port, lambda: b"swarmq_x 1\n"):
        page, other, posted = [
            await asyncio.to_thread(get, f"http://127.0.0.1:{port}{path}", method=method)
            for path, method in (("/metrics?x=1", "GET"), ("/", "GET"), ("/metrics", "POST"))
        ]
    assert page == (200, b"swarmq_x 1\n")
    assert (other[0], posted[0]) == (404, 405)


async def test_a_store_that_cannot_be_read_is_said_to_prometheus() -> None:
    def fail() -> bytes:
        raise CollectorError("the disk is full")

    port = reserve_port()
    async with serve_metrics("127.0.0.1", port, fail):
        assert await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics") == (503, b"the disk is full\n")


async def test_who_sends_nonsense_or_nothing_is_let_go() -> None:
    port = reserve_port()
    async with serve_metrics("127.0.0.1", port, lambda: b"x 1\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * 200_000)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert (await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics"))[0] == 200


async def test_a_port_that_is_taken_costs_a_warning() -> None:
    lines: list[str] = []
    port = reserve_port()
    with redirect_to(lines.append):
        async with serve_metrics("127.0.0.1", port, lambda: b""), serve_metrics("127.0.0.1", port, lambda: b""):
            pass
    assert [line for line in lines if line.startswith("warning: metrics not served")]


@pytest.mark.parametrize("port", [0])
async def test_port_0_serves_nothing(port: int) -> None:
    lines: list[str] = []
    with redirect_to(lines.append):
        async with serve_metrics("127.0.0.1", port, lambda: b""):
            pass
    assert not lines
