"""A host's daemon in the test's process, whose runs have scripted processes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession

from support.proxy import served
from swarmq import keys
from swarmq.config import SwarmJob
from swarmq.engine.server.gpus import GpuCapacity
from swarmq.host_daemon.access import AUDIENCE, HostAccess
from swarmq.host_daemon.app import create_app
from swarmq.host_daemon.check import CheckedJob
from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.service import HostService
from swarmq.messages import Event

ROOT = b"h" * 32
GIB = 1 << 30


class ScriptedProcess:
    """The process of a run, which ends when the test says so."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.gpus = tuple(gpus)
        self.signals: list[signal.Signals] = []
        self._ended = asyncio.Event()

    async def wait(self) -> None:
        await self._ended.wait()

    def send(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def end(self) -> None:
        self._ended.set()


class ScriptedLauncher:
    """Keeps the processes of runs, also for the next daemon."""

    def __init__(self) -> None:
        self.alive: dict[str, ScriptedProcess] = {}
        self.starts: list[str] = []
        self.fails = ""
        """Why no process can be started."""

    def start(self, run: str, gpus: Sequence[int]) -> ScriptedProcess:
        if self.fails:
            raise OSError(self.fails)
        assert run not in self.alive, "a run has two processes"
        self.starts.append(run)
        self.alive[run] = process = ScriptedProcess(gpus)
        return process

    def find(self, run: str) -> ScriptedProcess | None:
        return self.alive.get(run)


class ScriptedCheck:
    """Accepts every job that is one."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self._folder = folder
        self.gpus = [GpuCapacity(total=80 * GIB, free=80 * GIB)] * gpus

    def check(self, tree: Mapping[str, Any], *, gpus: int | None, is_admin: bool) -> CheckedJob:
        job = SwarmJob.build({**tree, "folder": str(self._folder)}, origin="job")
        return CheckedJob(job, len(self.gpus) if gpus is None else gpus, ("placement of main: here",))


class Host:
    """A daemon that serves a folder, and clients of it."""

    def __init__(self, service: HostService, launcher: ScriptedLauncher, url: str, http: ClientSession) -> None:
        self.service, self.launcher, self.url, self._http = service, launcher, url, http
        self.folder = service.folder

    async def ask(
        self, method: str, path: str, body: Any = None, *, role: keys.Role | None = "admin"
    ) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        headers = {"authorization": f"Bearer {token(role)}"} if role else {}
        async with self._http.request(method, f"{self.url}{path}", json=body, headers=headers) as answer:
            raw = await answer.read()
            return answer.status, msgspec.json.decode(raw) if raw else None

    async def ask_lines(self, path: str, body: Any) -> tuple[int, list[Any]]:
        """Return status and JSON lines of an answer."""
        headers = {"authorization": f"Bearer {token('admin')}"}
        async with self._http.post(f"{self.url}{path}", json=body, headers=headers) as answer:
            return answer.status, [msgspec.json.decode(line) for line in (await answer.read()).splitlines()]

    async def launch(self, run: str, request_id: str | None = None, **fields: Any) -> tuple[int, Any]:
        body = {"job": job(run), "request_id": request_id or f"id-{run}", **fields}
        return await self.ask("POST", "/v1/runs", body, role="operate")

    async def state(self, run: str) -> str:
        return (await self.ask("GET", f"/v1/runs/{run}"))[1]["state"]

    async def states(self) -> dict[str, str]:
        return {one["run"]: one["state"] for one in (await self.ask("GET", "/v1/runs"))[1]}

    def is_up(self, run: str, *, steps: int = 0, max_steps: int = 0) -> None:
        """Write what `swarmq up` writes when a run is up and has made some steps."""
        folder = self.folder.run(run)
        resolved = SwarmJob.load(folder.job)
        if max_steps:
            resolved = SwarmJob.build(
                msgspec.to_builtins(resolved), sets=[f"policies.main.train.max_steps={max_steps}"]
            )
        folder.resolved.write_text(resolved.to_toml())
        folder.invite.write_text("invite")
        for version in range(1, steps + 1):
            fields = {"version": version, "reward": 0.5}
            event = Event(run=run, source="learner.main", name="step", at=time.time(), fields=fields)
            with folder.events.open("ab") as file:
                file.write(msgspec.json.encode(event) + b"\n")

    async def end(self, run: str, says: str = "") -> None:
        """Let the run's process end. `says`: the message with which it ends, as errors do."""
        before = await self.ask("GET", f"/v1/runs/{run}")
        if says:
            with self.folder.log(run).open("a") as log:
                log.write(f"swarmq: {says}\n")
        self.launcher.alive.pop(run).end()
        await self.service.wait_for_change(run, before[1]["state"], 30.0)


def job(run: str, **settings: Any) -> dict[str, Any]:
    return {"run": run, "policies": {"main": {"model": "m"}}, **settings}


def token(role: keys.Role, *, name: str = "ann", root: bytes = ROOT, run: str = AUDIENCE) -> str:
    operator = keys.Operator(run=run, name=name, roles=(role,), expires_at=time.time() + 60)
    return keys.mint_operator(keys.derive_operator_secret(root, name), operator)


@asynccontextmanager
async def open_host(
    path: Path,
    launcher: ScriptedLauncher,
    *,
    gpus: int = 0,
    most_running: int = 1,
    most_queued: int = 10,
    check=None,
    port: int = 0,
):
    """A daemon that serves the folder `path` while the context is open; runs stay up after it."""
    folder = HostFolder(path)
    service = HostService(
        folder,
        launcher,
        check or ScriptedCheck(folder.path, gpus),
        most_running=most_running,
        most_queued=most_queued,
    )
    async with service.open(), served(create_app(service, HostAccess(ROOT)), port=port) as url, ClientSession() as http:
        yield Host(service, launcher, url, http)
