"""Starts a receiver beside an engine, and restarts it if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import structlog

from swarmq.engine.auth import SECRET_ENV
from swarmq.errors import EngineError
from swarmq.hosts.addresses import TlsFiles
from swarmq.runtime.processes import DeathCounter, die_with_parent, listen, read_tail, stop_group
from swarmq.weights.format.conventions import RECEIVER_PORT_ENV

log = structlog.get_logger()

MAX_DEATHS, DEATH_WINDOW_S = 3, 60.0
STOP_GRACE_S = 5.0


class Receiver:
    """A running receiver: its port and process id."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pid: int | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for the engine's vLLM, which reports the receiver's port to learners."""
        return {RECEIVER_PORT_ENV: str(self.port)}


@contextlib.asynccontextmanager
async def keep_receiver(
    host: str, port: int, *, secret: str, log_path: Path, tls: TlsFiles | None = None
) -> AsyncIterator[Receiver]:
    """Run a receiver at `host`:`port` until the block ends. Open it before the engine, and pass its environment to the engine's vLLM:

        async with keep_receiver("0.0.0.0", 8001, secret=secret, log_path=folder / "receiver.log") as receiver:
            ...  # start vLLM with os.environ | receiver.environment, listening on the same host

    `port`: 0 for a free port. `secret`: the engine's secret. `tls`: the engine's PEM files, because learners use scheme and host of the
    engine's URL. A receiver that dies is started again at the same port. Raises ConfigError if the port is taken, EngineError if the
    receiver keeps dying.
    """
    with listen(host, port, backlog=128, setting="the weight receiver's port") as listener:
        receiver = Receiver(listener.getsockname()[1])
        try:
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(_keep(receiver, listener, secret, tls, log_path))
                try:
                    yield receiver
                finally:
                    keeping.cancel()
        except ExceptionGroup as errors:
            error = errors.exceptions[0]  # the error of the block or of the receiver
            raise error from error.__cause__


async def _keep(receiver: Receiver, listener: socket.socket, secret: str, tls: TlsFiles | None, log_path: Path) -> None:
    deaths = DeathCounter(DEATH_WINDOW_S)
    fd = listener.fileno()
    while True:
        with log_path.open("ab", buffering=0) as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "swarmq.weights.receiver.server",
                str(fd),
                *((tls.certificate, tls.key) if tls else ()),
                env=os.environ | {SECRET_ENV: secret},
                pass_fds=[fd],  # the socket keeps listening while the receiver is restarted
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=die_with_parent,
            )
        receiver.pid = process.pid
        try:
            status = await process.wait()
        finally:
            await stop_group(process, grace_s=STOP_GRACE_S)
        if deaths.record_death() >= MAX_DEATHS:
            raise EngineError(
                f"the weight receiver ends again and again; the end of {log_path}:\n{read_tail(log_path)}"
            )
        log.warning("receiver_restarted", port=receiver.port, status=status, log=str(log_path))
