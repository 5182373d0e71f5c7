"""A private RabbitMQ node: a child process on loopback with its own name, cookie, ports, data and credentials.

    PrivateNode ──child──> broker             (the script execs the virtual machine: the pid is the broker's)
                └─NameServer ──child──> epmd  (Erlang's name server; private, so that no process stays behind)

Both children die with the parent, even after SIGKILL (on Linux). Data and credentials stay in the folder: a node started there
again is the same broker at the same URL. It does not disturb a system RabbitMQ or other private nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from swarmq.broker.node import probe
from swarmq.broker.node.files import (
    ADVANCED_CONFIG,
    HOST,
    JOIN_CONFIG,
    NodeIdentity,
    build_environment,
    extract_startup_error,
    has_data,
    is_password_new,
    load_identity,
    read_cookie,
    take_lock,
    write_node_files,
)
from swarmq.broker.node.install import INSTALL_HINT, RabbitmqInstall, find_server
from swarmq.errors import BrokerError
from swarmq.runtime.processes import die_with_parent, reserve_port, stop_group

START_S = 300.0
STOP_S = 20.0
POLL_S = 0.1


class NameServer:
    """Erlang's name server (epmd) as a child process. The nodes of a cluster share one and find each other through it."""

    def __init__(self) -> None:
        self.port = reserve_port(HOST)
        self.process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def start(self, spawn: Callable[[Path], Coroutine[Any, Any, asyncio.subprocess.Process]], epmd: Path) -> None:
        """Start the server unless it runs. `spawn`: starts the program at a path. `epmd`: path of the program."""
        async with self._lock:
            if self.process is None or self.process.returncode is not None:
                self.process = await spawn(epmd)

    async def stop(self) -> None:
        if self.process is not None:
            await stop_group(self.process, grace_s=STOP_S)


class PrivateNode:
    """A private broker in a folder: `async with PrivateNode(folder) as node:` runs it at `node.amqp_url`."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        config: str = "",
        advanced: str = ADVANCED_CONFIG,
        names: NameServer | None = None,
        joins: PrivateNode | None = None,
    ) -> None:
        """`port` 0 picks a free AMQP port once and keeps it. `config` is appended to rabbitmq.conf. `names` is the name server
        of a cluster, which keeps running after the node. `joins` is a running node, whose cluster this node joins at its first
        start."""
        self.folder = folder.absolute()
        self._port = port
        self._config = config
        self._advanced = advanced
        self._shared_names = names
        self._joins = joins
        self._names = NameServer()
        self._identity: NodeIdentity | None = None
        self._server: RabbitmqInstall | None = None
        self._lock: IO[str] | None = None
        self._broker: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def identity(self) -> NodeIdentity:
        if self._identity is None:
            raise BrokerError(f"the private RabbitMQ in {self.folder} has not been started")
        return self._identity

    @property
    def amqp_url(self) -> str:
        return self.identity.amqp_url

    @property
    def pids(self) -> list[int]:
        """Process ids of the running broker and its own name server."""
        children = [self._broker, None if self._shared_names else self._names.process]
        return [child.pid for child in children if child is not None and child.returncode is None]

    @property
    def has_data(self) -> bool:
        """Whether the node was started before."""
        return has_data(self.folder)

    async def start(self) -> None:
        """Start the node and return when it accepts clients. Raises BrokerError if there is no server on this machine, the port
        is taken, the folder is in use, or the node fails to start."""
        self._server = find_server()
        if self._server is None:
            raise BrokerError(
                f"no RabbitMQ server on this machine: `python -m swarmq.broker.node.install`, or {INSTALL_HINT}"
            )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = take_lock(self.folder)
        try:
            self._names = self._shared_names or NameServer()
            first = self._joins.identity if self._joins else None
            self._identity = load_identity(self.folder, port=self._port, epmd_port=self._names.port, first=first)
            set_password = is_password_new(self.folder, self._identity)
            write_node_files(
                self.folder,
                self._identity,
                config=self._config + (JOIN_CONFIG.format(node=first.node) if first else ""),
                advanced=self._advanced,
                cookie=read_cookie(self._joins.folder) if self._joins else b"",
            )
            await self._start_children(self._server, self._identity, set_password=set_password)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the broker, then its own name server, and wait for them."""
        if self._broker is not None:
            await stop_group(self._broker, grace_s=STOP_S)
        if self._shared_names is None:
            await self._names.stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def kill(self) -> None:
        """Kill the broker with SIGKILL; `start` brings it back with its data."""
        if self._broker is not None:
            with contextlib.suppress(ProcessLookupError):
                self._broker.kill()
            await self._broker.wait()
        await self.stop()

    async def wait(self) -> int:
        """Wait until the broker ends, and return its exit status."""
        assert self._broker is not None
        return await self._broker.wait()

    async def refuses_connections(self) -> bool:
        """Return whether the broker serves no clients although its process may live.

        The management API is asked first, because a broker logs every AMQP connection.
        """
        identity = self.identity
        return not await probe.accepts_management_login(
            HOST, identity.management_port, user=identity.user, password=identity.password
        ) and await probe.refuses_connections(HOST, identity.amqp_port)

    async def ctl(self, *arguments: str) -> str:
        """Run `rabbitmqctl` and return its output. Raises BrokerError if it fails."""
        assert self._server is not None
        process = await asyncio.create_subprocess_exec(
            self._server.home / "sbin" / "rabbitmqctl",
            *arguments,
            env=build_environment(self.folder, self.identity, self._server.erlang_bin),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode(errors="replace")
        if process.returncode:
            raise BrokerError(f"`rabbitmqctl {arguments[0]}` failed: {output.strip()[-500:]}")
        return output

    async def _start_children(self, server: RabbitmqInstall, identity: NodeIdentity, *, set_password: bool) -> None:
        await self._names.start(partial(self._spawn, server), server.epmd)
        assert self._names.process is not None
        await self._wait_until(lambda: probe.can_connect(HOST, identity.epmd_port), self._names.process)
        self._broker = await self._spawn(server, server.home / "sbin" / "rabbitmq-server")
        await self._wait_until(lambda: probe.is_amqp_ready(HOST, identity.amqp_port), self._broker)
        if set_password:
            await self.ctl("change_password", identity.user, identity.password)
        ui = identity.management_port
        await self._wait_until(
            lambda: probe.accepts_management_login(HOST, ui, user=self.identity.user, password=self.identity.password),
            self._broker,
        )

    async def _spawn(self, server: RabbitmqInstall, program: Path) -> asyncio.subprocess.Process:
        with self._start_log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                program,
                cwd=self.folder,  # Erlang writes its crash dumps here
                env=build_environment(self.folder, self.identity, server.erlang_bin),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )

    async def _wait_until(
        self, is_up: Callable[[], Coroutine[Any, Any, bool]], child: asyncio.subprocess.Process
    ) -> None:
        """Poll `is_up` until it returns True. Raises BrokerError if `child` ends first or `START_S` passes."""
        try:
            async with asyncio.timeout(START_S):
                while not await is_up():
                    if child.returncode is not None:
                        raise BrokerError(f"RabbitMQ ended while starting: {self._describe_startup_error()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise BrokerError(f"RabbitMQ is not up after {START_S:g} s: {self._describe_startup_error()}") from None

    @property
    def _start_log(self) -> Path:
        return self.folder / "log" / "start.log"

    def _describe_startup_error(self) -> str:
        return (
            f"{extract_startup_error(self._start_log.read_text(errors='replace'))} (more in {self._start_log.parent})"
        )
