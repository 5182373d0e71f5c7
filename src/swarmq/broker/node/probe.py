"""Probes of a server: it cannot report by itself that it is up or has stopped working."""

from __future__ import annotations

import asyncio
import base64

TIMEOUT_S = 5.0
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"


async def can_connect(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


async def refuses_connections(host: str, port: int) -> bool:
    """Return whether a connection is refused, or closed after the protocol header. A slow server does neither."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(PROTOCOL_HEADER)
                return not await reader.read(1)
            finally:
                writer.close()
    except TimeoutError:
        return False
    except OSError:
        return True


async def is_amqp_ready(host: str, port: int) -> bool:
    """Return whether the broker answers the protocol header with a METHOD frame, i.e. accepts clients."""
    return await _ask(host, port, PROTOCOL_HEADER, 1) == b"\x01"


async def accepts_management_login(host: str, port: int, *, user: str, password: str) -> bool:
    """Return whether the management API accepts this login."""
    login = base64.b64encode(f"{user}:{password}".encode()).decode()
    request = f"GET /api/whoami HTTP/1.0\r\nAuthorization: Basic {login}\r\n\r\n"
    return b" 200 " in await _ask(host, port, request.encode(), 16)


async def _ask(host: str, port: int, request: bytes, answer_bytes: int) -> bytes:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return b""
    try:
        writer.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read(answer_bytes)
    except (OSError, TimeoutError):
        return b""
    finally:
        writer.close()
