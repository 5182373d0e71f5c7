"""The daemon's HTTP application: routes, authorization and errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import structlog
from litestar import Litestar, Request, delete, get, post
from litestar.exceptions import ClientException, ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import RedocRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.params import Body, FromPath, FromQuery, Parameter
from litestar.response import Response, Stream

from swarmq.dashboard.access import ForbiddenError
from swarmq.dashboard.views import list_logs, read_board
from swarmq.errors import BrokerError, SwarmqError
from swarmq.host_daemon.access import HostAccess, get_caller
from swarmq.host_daemon.check import find_setting
from swarmq.host_daemon.commands import check_role, run_command
from swarmq.host_daemon.files import follow_log, list_files, read_piece
from swarmq.host_daemon.service import HostService
from swarmq.keys import Role
from swarmq.proxy.http.authorization import OPERATOR_SCHEME
from swarmq.proxy.http.control_routes import FaultBody, OptionalBody, refuse_invalid, refuse_malformed
from swarmq.proxy.http_errors import Refusal, RefusedError, to_refusal
from swarmq.remote.commands import CommandRequest
from swarmq.remote.records import (
    SIZE_HEADER,
    UP_LOG,
    ActionAnswer,
    ActionRequest,
    CheckRequest,
    FileView,
    HostView,
    InviteAnswer,
    InviteRequest,
    LaunchRequest,
    PlanView,
    ResumeRequest,
    RunState,
    RunView,
    StopRequest,
    TasksAnswer,
    TasksRequest,
)
from swarmq.version import __version__

PATH = "/v1"
RUNS = f"{PATH}/runs"
RUN = f"{RUNS}/{{run:str}}"
MAX_BODY = 1024 * 1024
"""Size of the largest job in bytes."""
MAX_TASKS = 256 * 1024 * 1024
"""Size of the largest data set in bytes."""
MAX_WAIT_S = 60.0
MAX_LINES = 100_000
MOST_COMMANDS = 16
"""Maximum number of clients' commands that run at the same time; further ones wait."""
STOP, RESUME = StopRequest(), ResumeRequest()
"""Meaning of an empty body."""

FAULTS = {
    400: ResponseSpec(
        FaultBody, description="The request or the job is wrong; `param` is the path of the setting or field."
    ),
    401: ResponseSpec(FaultBody, description="No token, or one that is forged, expired or of another host."),
    403: ResponseSpec(FaultBody, description="The token lacks the role."),
}
UNKNOWN = {404: ResponseSpec(FaultBody, description="There is no such run.")}
CONFLICT = {409: ResponseSpec(FaultBody, description="The name is taken, or the run's state does not permit it.")}
FULL = {429: ResponseSpec(FaultBody, description="The host has no room, and its queue neither.")}
CUT_OFF = {503: ResponseSpec(FaultBody, description="The run did not answer in time; ask again.")}

log = structlog.get_logger()


def create_app(service: HostService, access: HostAccess) -> Litestar:
    """Create the daemon of a host. The caller opens `service` first."""
    return Litestar(
        HostRoutes(service, access).handlers(),
        openapi_config=OpenAPIConfig(
            title="swarmq host",
            version=__version__,
            use_handler_docstrings=True,
            render_plugins=[RedocRenderPlugin()],
            components=Components(security_schemes={OPERATOR_SCHEME: SecurityScheme(type="http", scheme="bearer")}),
        ),
        exception_handlers={
            Exception: refuse,
            ValidationException: refuse_invalid,
            ClientException: refuse_malformed,
        },
        request_max_body_size=MAX_BODY,
        logging_config=None,
    )


def refuse(_: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Answer an error in the form that the proxy's errors have."""
    refusal = _describe(error)
    if refusal.status == 500 or isinstance(error, OSError):
        log.error("request_failed", reason=repr(error), exc_info=error)
    return Response(refusal.body, status_code=refusal.status, headers=refusal.headers)


def _describe(error: Exception) -> Refusal:
    match error:
        case ForbiddenError():
            return to_refusal(RefusedError(str(error), status=403, code="role_missing"))
        case BrokerError():
            return to_refusal(RefusedError(str(error), status=503, code="broker_unavailable"))
        case OSError():
            return to_refusal(RefusedError(f"the host cannot store it: {error}", status=503, code="host_failed"))
        case RefusedError():
            return to_refusal(error)
        case SwarmqError() if (path := find_setting(str(error))) is not None:
            return to_refusal(RefusedError(str(error), code="invalid_setting", param=path))
    refusal = to_refusal(error)
    if isinstance(error, SwarmqError) and refusal.status >= 500:  # the caller operates this host and may read all of it
        return to_refusal(RefusedError(str(error)))
    return refusal


class HostRoutes:
    """Handlers of all routes."""

    def __init__(self, service: HostService, access: HostAccess) -> None:
        self._service, self._access = service, access
        self._commands = asyncio.Semaphore(MOST_COMMANDS)

    def handlers(self) -> list[HTTPRouteHandler]:
        """Return the route handlers for the application."""
        read, operate, admin = (self._options(role) for role in ("read", "operate", "admin"))
        known, changed = FAULTS | UNKNOWN, FAULTS | UNKNOWN | CONFLICT
        return [
            get("/health", exclude_from_auth=True)(self.health),
            get(f"{PATH}/host", operation_id="showHost", responses=FAULTS, **read)(self.show_host),
            get(RUNS, operation_id="listRuns", responses=FAULTS, **read)(self.list_runs),
            get(RUN, operation_id="showRun", responses=known, **read)(self.show_run),
            post(f"{PATH}/check", operation_id="checkJob", responses=FAULTS | CONFLICT, status_code=200, **operate)(
                self.check
            ),
            post(RUNS, operation_id="launchRun", responses=FAULTS | CONFLICT | FULL, status_code=200, **operate)(
                self.launch
            ),
            post(
                f"{RUN}/stop",
                operation_id="stopRun",
                operation_class=OptionalBody,
                responses=known,
                status_code=200,
                **operate,
            )(self.stop),
            post(
                f"{RUN}/resume",
                operation_id="resumeRun",
                operation_class=OptionalBody,
                responses=changed | CUT_OFF,
                status_code=200,
                **operate,
            )(self.resume),
            post(f"{RUN}/actions", operation_id="changeRun", responses=changed | CUT_OFF, status_code=200, **operate)(
                self.act
            ),
            post(
                f"{RUN}/tasks",
                operation_id="feedTasks",
                responses=changed | CUT_OFF,
                request_max_body_size=MAX_TASKS,
                status_code=200,
                **operate,
            )(self.feed),
            post(f"{RUN}/clients", operation_id="inviteClient", responses=changed, status_code=200, **operate)(
                self.invite
            ),
            post(f"{PATH}/commands", operation_id="runCommand", responses=FAULTS, status_code=200, **read)(
                self.run_command
            ),
            get(f"{RUN}/board", operation_id="showBoard", responses=known, **read)(self.show_board),
            get(f"{RUN}/logs", operation_id="listLogs", responses=known, **read)(self.list_logs),
            get(f"{RUN}/logs/{{name:str}}", operation_id="readLog", responses=known, **read)(self.read_log),
            get(f"{RUN}/files", operation_id="listFiles", responses=known, **read)(self.list_files),
            get(f"{RUN}/files/{{path:path}}", operation_id="readFile", responses=known, **read)(self.read_file),
            delete(RUN, operation_id="deleteRun", responses=changed, **admin)(self.delete),
        ]

    def _options(self, role: Role) -> dict[str, Any]:
        return {"guards": [self._access.require(role)], "security": [{OPERATOR_SCHEME: [role]}]}

    async def health(self) -> dict[str, str]:
        """Answer that the daemon serves."""
        return {"status": "ok"}

    async def show_host(self) -> HostView:
        """Show the host, and which runs it runs and has queued."""
        return self._service.show_host()

    async def list_runs(self) -> list[RunView]:
        """List all runs in the order of their launches."""
        return self._service.list_runs()

    async def show_run(
        self,
        run: FromPath[str],
        unlike: FromQuery[RunState | None] = None,
        wait_s: Annotated[float, Parameter(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> RunView:
        """Show a run. With `unlike` and `wait_s`, the answer comes as soon as its state differs from `unlike`."""
        if unlike is None:
            return self._service.show_run(run)
        return await self._service.wait_for_change(run, unlike, wait_s)

    async def check(self, data: Annotated[CheckRequest, Body()], request: Request[Any, Any, Any]) -> PlanView:
        """Check a job: whether this host can run it, and how it would place it. Nothing is started."""
        checked = await self._service.check(data.job, data.gpus, is_admin=get_caller(request).is_admin)
        return PlanView(run=checked.job.run, lines=checked.lines)

    async def launch(self, data: Annotated[LaunchRequest, Body()], request: Request[Any, Any, Any]) -> RunView:
        """Queue a job, and start it if there is room. Repeatable with the same `request_id`."""
        caller = get_caller(request)
        return await self._service.launch(data, owner=caller.name, is_admin=caller.is_admin)

    async def stop(self, run: FromPath[str], data: Annotated[StopRequest, Body()] = STOP) -> RunView:
        """Stop a run, with a checkpoint. Its GPUs are free when its state is `stopped`. Repeatable."""
        return self._service.stop(run, now=data.now)

    async def resume(
        self, run: FromPath[str], request: Request[Any, Any, Any], data: Annotated[ResumeRequest, Body()] = RESUME
    ) -> RunView:
        """Continue a run: after a pause, or from its newest checkpoint. Repeatable."""
        caller = get_caller(request)
        return await self._service.resume(run, data, sender=caller.name, is_admin=caller.is_admin)

    async def act(
        self, run: FromPath[str], data: Annotated[ActionRequest, Body()], request: Request[Any, Any, Any]
    ) -> ActionAnswer:
        """Change a run that is up: pause, drain, checkpoint, settings (`set`), or a client to revoke."""
        return await self._service.act(
            run, data.action, sender=get_caller(request).name, settings=data.settings, client=data.client
        )

    async def invite(self, run: FromPath[str], data: Annotated[InviteRequest, Body()]) -> InviteAnswer:
        """Invite a client, which runs episodes over HTTP at the run's proxies. A name is used once."""
        return InviteAnswer(invite=await asyncio.to_thread(self._service.invite, run, data.name))

    async def feed(self, run: FromPath[str], data: Annotated[TasksRequest, Body()]) -> TasksAnswer:
        """Put tasks on the queue of a kind, for the workers of a run that is up, or store them for its evaluation. Repeatable."""
        return await self._service.feed(run, data)

    async def run_command(self, data: Annotated[CommandRequest, Body()], request: Request[Any, Any, Any]) -> Stream:
        """Run a command of `swarmq` on this host, and send its output as JSON lines. Each command needs a role of its own."""
        caller = get_caller(request)
        check_role(data, caller.roles)
        return Stream(self._run_command(data, caller.name), media_type="application/x-ndjson")

    async def _run_command(self, data: CommandRequest, sender: str) -> AsyncIterator[bytes]:
        async with (
            self._commands,
            contextlib.aclosing(run_command(self._service.folder.path, data, sender=sender)) as output,
        ):
            async for piece in output:
                yield piece

    async def show_board(self, run: FromPath[str]) -> dict[str, Any]:
        """Show everything about a run's present state, as `swarmq status --json` does; empty before the run was up."""
        return await asyncio.to_thread(read_board, self._service.open_folder(run))

    async def list_logs(self, run: FromPath[str]) -> list[FileView]:
        """List the logs of a run; `up.log` is the output of its `swarmq up`."""
        files = await asyncio.to_thread(list_logs, self._service.open_folder(run))
        return [FileView(path=one["name"], size_bytes=one["bytes"]) for one in files]

    async def read_log(
        self,
        run: FromPath[str],
        name: FromPath[str],
        lines: Annotated[int, Parameter(ge=0, le=MAX_LINES)] = 400,
        follow: FromQuery[bool] = False,
    ) -> Stream:
        """Send the last lines of a log and, with `follow`, everything that is appended to it, until the run has ended."""
        folder = self._service.open_folder(run)
        if name != UP_LOG and name not in {one["name"] for one in await asyncio.to_thread(list_logs, folder)}:
            raise RefusedError(f"name: the run has no log {name[:60]!r}", status=404, code="file_unknown", param="name")
        text = follow_log(folder.logs / name, lambda: self._service.is_active(run), lines=lines, follow=follow)
        return Stream(text, media_type="text/plain; charset=utf-8")

    async def list_files(self, run: FromPath[str], under: FromQuery[str] = "") -> list[FileView]:
        """List the files of a run below a path: batch logs, checkpoints, token traces, transcripts, events, logs."""
        folder, policies = self._service.open_folder(run), self._service.list_policies(run)
        return await asyncio.to_thread(list_files, folder, policies, under)

    async def read_file(
        self, run: FromPath[str], path: FromPath[Path], offset: Annotated[int, Parameter(ge=0)] = 0
    ) -> Response[bytes]:
        """Send a piece of a file, at most 16 MiB from `offset` on; the header `x-swarmq-size` is the size of the whole file."""
        folder, policies = self._service.open_folder(run), self._service.list_policies(run)
        piece, size = await asyncio.to_thread(read_piece, folder, policies, str(path).removeprefix("/"), offset)
        return Response(piece, media_type="application/octet-stream", headers={SIZE_HEADER: str(size)})

    async def delete(self, run: FromPath[str]) -> None:
        """Remove a run that has no process, with its folder: checkpoints, batch log, everything."""
        await self._service.delete(run)
