"""The dashboard as a process of its own: `swarmq dashboard`, or behind a proxy on a socket file (`python -m swarmq.dashboard.serving`).

The process behind a proxy has a low priority and ends with the proxy, so that reading a large run never delays an agent's call.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvicorn

from swarmq import keys
from swarmq.config import RunFolder
from swarmq.dashboard.access import LinkAccess, OperatorAccess
from swarmq.dashboard.app import Studies, create_app
from swarmq.dashboard.process_settings import BASE, READY, DashboardProcessSettings
from swarmq.dashboard.shelf import Shelf
from swarmq.registries.clients import RevokedNames
from swarmq.runtime import logs
from swarmq.runtime.processes import die_with_parent, listen

DRAIN_S = 1
"""Seconds that open answers get when the process ends; event streams never end by themselves."""
NICENESS = 10
BACKLOG = 128


def serve(
    folders: Sequence[Path],
    *,
    host: str,
    port: int,
    say: Callable[[str], None],
    cache: Path | None = None,
    studies: Studies | None = None,
) -> None:
    """Serve the runs in `folders` until a signal; `say` is called with the link. Raises ConfigError if the port is taken."""
    logs.configure(role="dashboard", run="")
    listener = listen(host, port, backlog=BACKLOG, setting=f"--port {port}", advice="choose another, or 0 for any")
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(32)
    access = LinkAccess(token, name=getpass.getuser(), cookie=f"swarmq_dashboard_{port}")
    app = create_app(Shelf(folders, cache=cache), access, studies=studies)
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{port}/#token={token}")
    asyncio.run(Server(_config(app)).serve(sockets=[listener]))


def serve_behind_proxy(settings: DashboardProcessSettings) -> None:
    """Serve one run on a socket file until the parent process ends."""
    logs.configure(role="dashboard", run=settings.run)
    die_with_parent()
    os.nice(NICENESS)
    folder = RunFolder(Path(settings.folder))
    root = keys.load_root(folder.root_secret)
    access = OperatorAccess(root, settings.run, revoked=RevokedNames(folder.clients))
    app = create_app(Shelf([folder.path]), access, base=BASE, is_secure=settings.is_secure)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(settings.socket)
    listener.listen(BACKLOG)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    asyncio.run(Server(_config(app)).serve(sockets=[listener]))


class Server(uvicorn.Server):
    """Server that ends quietly: the first signal stops it, and none is raised again afterwards."""

    def handle_exit(self, sig: int, frame: object) -> None:  # noqa: ARG002
        self.force_exit = self.should_exit
        self.should_exit = True


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )


if __name__ == "__main__":
    serve_behind_proxy(msgspec.json.decode(sys.argv[1], type=DashboardProcessSettings))
