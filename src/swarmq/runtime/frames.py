"""Framing of the records between two processes on a socket: eight bytes with the length, then the record."""

from __future__ import annotations

import asyncio
import struct

LENGTH = struct.Struct("<Q")


async def write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Write a record. Raises EOFError if the other process is gone."""
    if writer.is_closing():  # uvloop raises RuntimeError for a closed transport
        raise EOFError("the other process is gone")
    try:
        writer.write(LENGTH.pack(len(body)))
        writer.write(body)
        await writer.drain()
    except ConnectionError as error:
        raise EOFError("the other process is gone") from error


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read a record. Raises EOFError if the other process is gone."""
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other process is gone") from error
