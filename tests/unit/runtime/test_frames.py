"""Records between two processes, one of which is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import uvloop

from swarmq.runtime.frames import write_frame


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_record_for_a_process_that_is_gone_is_an_end_of_file(new_event_loop):
    async def write() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        theirs.close()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        with pytest.raises(EOFError, match="the other process is gone"):
            await write_frame(writer, b"record")

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(write())
