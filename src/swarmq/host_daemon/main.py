"""The daemon's process: one lock, two listeners, and an end that leaves all runs up.

clients elsewhere ── https, operator token ──> TCP  ──┐
this user, ssh -L ── file rights ────────────> socket ┴─> app ──> service ──> `swarmq up` of each run
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog
import uvicorn
from litestar import Litestar

from swarmq import keys
from swarmq.config import make_folder
from swarmq.errors import ConfigError
from swarmq.host_daemon.access import HostAccess
from swarmq.host_daemon.app import create_app
from swarmq.host_daemon.check import JobCheck, find_host_gpus
from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.processes import UP, UpLauncher
from swarmq.host_daemon.service import HostService
from swarmq.hosts.addresses import TlsFiles, format_url
from swarmq.registries.clients import RevokedNames
from swarmq.runtime import logs
from swarmq.runtime.processes import listen

ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - refused
BACKLOG = 128
DRAIN_S = 2
"""Seconds that open answers get when the daemon ends; streams never end by themselves."""

log = structlog.get_logger()


def serve(
    path: Path,
    *,
    host: str,
    port: int,
    tls: TlsFiles | None,
    most_running: int | None,
    most_queued: int,
    command: Sequence[str] = UP,
) -> None:
    """Serve the runs in the folder `path` until SIGTERM or SIGINT; runs stay up.

    `most_running`: maximum number of runs at the same time; None: one for each GPU. `command`: starts a run. Raises ConfigError if the port is taken, another
    daemon serves the folder, or its files are damaged.
    """
    if host in ANY_ADDRESS:
        raise ConfigError(
            f"--host {host}: give the name or address by which clients reach this host; runs' proxies listen there, too"
        )
    logs.configure(role="host", run="")
    folder = HostFolder(path)
    make_folder(folder.records)
    with (
        _lock(folder),
        listen(host, port, backlog=BACKLOG, setting=f"--port {port}") as listener,
        listen_on_file(folder.socket) as own,
    ):
        gpus = find_host_gpus()
        service = HostService(
            folder,
            UpLauncher(folder, command=command),
            JobCheck(folder.path, gpus, address=host),
            most_running=most_running or max(1, len(gpus)),
            most_queued=most_queued,
        )
        app = create_app(service, HostAccess(keys.load_root(folder.root_secret), revoked=RevokedNames(folder.revoked)))
        url = format_url("https" if tls else "http", host, listener.getsockname()[1])
        asyncio.run(_serve(service, app, (listener, own), tls, url))


@contextlib.contextmanager
def listen_on_file(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket file that its owner alone can open. Raises ConfigError if the path is too long for a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path.unlink(missing_ok=True)  # left by a daemon that was killed
        try:
            listener.bind(str(path))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be a socket ({error}): serve a folder with a shorter path") from error
        path.chmod(0o600)
        listener.listen(BACKLOG)
        yield listener
        path.unlink(missing_ok=True)


async def _serve(
    service: HostService, app: Litestar, listeners: Sequence[socket.socket], tls: TlsFiles | None, url: str
) -> None:
    servers = [QuietServer(_config(app, tls)), QuietServer(_config(app, None))]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, servers)
    async with service.open(), asyncio.TaskGroup() as tasks:
        for server, listener in zip(servers, listeners, strict=True):
            tasks.create_task(server.serve(sockets=[listener]))
        log.info("listening", url=url, runs=len(service.list_runs()))


class QuietServer(uvicorn.Server):
    """Server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _end(servers: list[QuietServer]) -> None:
    for server in servers:
        server.force_exit = server.should_exit
        server.should_exit = True


def _config(app: Litestar, tls: TlsFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
        timeout_graceful_shutdown=DRAIN_S,
    )


@contextlib.contextmanager
def _lock(folder: HostFolder) -> Iterator[None]:
    """Hold the folder's lock. Raises ConfigError with the holder's process id if another daemon serves the folder."""
    with folder.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(f"{folder.path}: process {lock.read().strip()} serves this folder already") from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
