"""The faulty wire itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from swarmq.testing import TcpRelay
from swarmq.testing.relay import Way


@pytest.fixture
async def relay() -> AsyncIterator[TcpRelay]:
    """In front of a server that says back what it hears."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(100):
            writer.write(chunk)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, TcpRelay.to("127.0.0.1", server.sockets[0].getsockname()[1]) as relay, asyncio.timeout(120):
        yield relay


async def test_bytes_pass_both_ways(relay: TcpRelay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()
    assert await reader.read() == b""
    assert relay.connections == 1


async def test_a_cut_resets_connections(relay: TcpRelay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"hello")
    await reader.readexactly(5)
    relay.cut()
    assert await gone(reader)
    writer.close()


async def test_a_cut_after_some_bytes_lets_exactly_those_pass(relay: TcpRelay) -> None:
    relay.cut_after(3)
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"hello")
    assert await gone(reader)
    writer.close()


async def test_a_held_wire_neither_passes_nor_closes(relay: TcpRelay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    relay.hold(Way.ANSWERS)
    writer.write(b"hello")
    waiting = asyncio.ensure_future(reader.readexactly(5))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    relay.release()
    assert await waiting == b"hello"
    writer.close()


async def gone(reader: asyncio.StreamReader) -> bool:
    try:
        return len(await reader.read()) <= 3
    except ConnectionError:
        return True
