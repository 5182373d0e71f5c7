"""Processes of the commands that clients run on this host (`swarmq.cli.on_host`)."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from swarmq.proxy.http_errors import RefusedError
from swarmq.remote.commands import ROLES, Call, CommandRequest, Output

PIECE_BYTES = 1 << 16


def check_role(request: CommandRequest, may: frozenset[str]) -> None:
    """Raise RefusedError unless the command may be run by somebody with the roles `may`."""
    words = " ".join(request.command)
    if (role := ROLES.get(request.command)) is None:
        raise RefusedError(f"command: `swarmq {words[:60]}` cannot be run on another host", param="command")
    if role not in may:
        raise RefusedError(
            f"`swarmq {words}` needs the role {role}, and the token has {', '.join(sorted(may)) or 'none'}",
            status=403,
            code="role_missing",
        )


async def run_command(folder: Path, request: CommandRequest, *, sender: str) -> AsyncGenerator[bytes]:
    """Run a command and yield its output as JSON lines. Its process ends with this generator. `sender`: name of the operator, which the
    run records."""
    terminal = request.terminal
    shown = {"COLUMNS": str(terminal.columns), "LINES": str(terminal.lines)}
    if terminal.is_interactive:
        shown |= {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    written = tempfile.TemporaryDirectory(prefix="swarmq-command-")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarmq.cli.on_host"),
        msgspec.json.encode(Call(folder=str(folder), written=written.name, request=request)).decode(),
        env=os.environ | shown | {"LOGNAME": sender},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    pieces: asyncio.Queue[Output | None] = asyncio.Queue()
    try:
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(_read(process.stdout, "out", pieces)),
                tasks.create_task(_read(process.stderr, "err", pieces)),
            ]
            for _ in readers:
                while (piece := await pieces.get()) is not None:
                    yield msgspec.json.encode(piece) + b"\n"
        status = await process.wait()
        for part in _read_files(Path(written.name)) if status == 0 else ():
            yield msgspec.json.encode(Output(file=part)) + b"\n"
        yield msgspec.json.encode(Output(status=status)) + b"\n"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        written.cleanup()


def _read_files(folder: Path) -> Iterator[bytes]:
    """Yield the content of the file that a command has written, if it wrote one."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece


async def _read(
    source: asyncio.StreamReader, stream: Literal["out", "err"], pieces: asyncio.Queue[Output | None]
) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while raw := await source.read(PIECE_BYTES):
        pieces.put_nowait(Output(text=decoder.decode(raw), stream=stream))
    pieces.put_nowait(None)
