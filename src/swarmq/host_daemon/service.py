"""What happens to a run between its launch and its deletion.

    launch ──> queued ──room──> running ──last step──> done
                 ▲ ▲               │ ├─────stop──────> stopping ──> stopped
                 │ └──it died──────┘ └──it says why──> failed
                 └───────────────── resume ───────────(stopped, done, failed)

Every change of state is on disk before a client learns of it. The daemon waits for the end of each run's process, also of those that
an earlier daemon started.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import signal
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import structlog

from swarmq import live_settings
from swarmq.broker.admin.invitations import ClientAddresses, add_client
from swarmq.client.data.tasks import SwarmTask
from swarmq.client.episodes.invite_lookup import find_invite
from swarmq.collector import ledger as collector_ledger
from swarmq.config import RunFolder, SwarmJob, make_folder
from swarmq.dashboard import actions
from swarmq.errors import SwarmqError
from swarmq.host_daemon.check import CheckedJob, JobCheck
from swarmq.host_daemon.ledger import HostFolder, Ledger, RunRecord
from swarmq.host_daemon.processes import Launcher, RunProcess
from swarmq.host_daemon.queue import choose_startable, list_queued
from swarmq.observe.feeding import feed_evaluation, feed_training
from swarmq.observe.live_runs import find_management_api, load_live_run
from swarmq.observe.runs import PolicyProgress, ProgressCache, RunRow, read_row
from swarmq.proxy.http_errors import RefusedError
from swarmq.remote.records import (
    ActionAnswer,
    HostView,
    LaunchRequest,
    PolicyView,
    ResumeRequest,
    RunState,
    RunView,
    TasksAnswer,
    TasksRequest,
)
from swarmq.runtime.files import write_atomically
from swarmq.runtime.processes import DeathCounter, is_locked, read_final_message, read_tail
from swarmq.up.shutdown import describe_ended_policies
from swarmq.up.supervision import MAX_DEATHS
from swarmq.version import __version__

DEATH_WINDOW_S = 600.0
"""Seconds within which the deaths of a run are counted; it is not started again after `MAX_DEATHS`."""
POLL_S = 1.0
"""Seconds between two checks of the files of a run that a client waits for."""

log = structlog.get_logger()


class HostService:
    """The runs of a host."""

    def __init__(
        self,
        folder: HostFolder,
        launcher: Launcher,
        check: JobCheck,
        *,
        most_running: int,
        most_queued: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`most_running`, `most_queued`: maximum number of runs that run, and that wait, at the same time.

        Raises ConfigError if what an earlier daemon wrote cannot be read."""
        self.folder = folder
        self._launcher, self._check, self._now = launcher, check, now
        self._most_running, self._most_queued = most_running, most_queued
        self._ledger = Ledger(folder)
        self._progress = ProgressCache()
        self._launching = asyncio.Lock()
        self._processes: dict[str, RunProcess] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self._deaths: dict[str, DeathCounter] = {}
        self._changed = asyncio.Event()
        self._feeding: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Find the runs of an earlier daemon, and keep all runs up while the context is open. They stay up when it is closed."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            shutil.rmtree(self.folder.deleted, ignore_errors=True)  # left by a daemon that was killed while it deleted
            for record in self._ledger:
                if record.is_running and (process := self._launcher.find(record.run)):
                    log.info("run_found", run=record.run)
                    self._keep(record.run, process)
                elif record.is_running:
                    self._settle(record)
            self._start_queued()
            try:
                yield
            finally:
                for task in self._keepers:
                    task.cancel()

    # ---------------------------------------------------------------------------------------------- reading

    def show_host(self) -> HostView:
        records = list(self._ledger)
        return HostView(
            host=socket.gethostname(),
            version=__version__,
            gpus=len(self._check.gpus),
            most_running=self._most_running,
            running=tuple(one.run for one in records if one.is_running),
            queued=tuple(one.run for one in list_queued(records)),
        )

    def list_runs(self) -> list[RunView]:
        """Return all runs, in the order of their launches."""
        return [self.show_run(record.run) for record in self._ledger]

    def show_run(self, run: str) -> RunView:
        """Return the state of a run. Raises RefusedError if there is none of this name."""
        record = self.find(run)
        row = self._read_row(record)
        queued = [one.run for one in list_queued(self._ledger)]
        marks = row.state.split(", ") if row else []
        return RunView(
            run=run,
            state=self._state(record),
            pace=next((mark for mark in marks if mark in {"paused", "draining"}), "running"),
            detail=record.detail,
            policies=self._show_policies(record, row.policies if row else {}),
            position=queued.index(run) + 1 if run in queued else None,
            gpus=record.gpus if record.is_running else (),
            owner=record.owner,
            request_id=record.request_id,
            launched_at=record.launched_at,
            started_at=record.started_at,
            restarts=record.restarts,
        )

    async def wait_for_change(self, run: str, state: RunState, wait_s: float) -> RunView:
        """Return the run as soon as its state differs from `state`, or after `wait_s` seconds."""
        until = time.monotonic() + wait_s
        while (view := self.show_run(run)).state == state and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                # that a run is up is not written here, but in its folder
                await asyncio.wait_for(self._changed.wait(), min(left, POLL_S))
        return view

    def find(self, run: str) -> RunRecord:
        """Return the record of a run. Raises RefusedError if there is none of this name."""
        if record := self._ledger.get(run):
            return record
        raise RefusedError(f"there is no run {run[:60]!r} on this host", status=404, code="run_unknown")

    def open_folder(self, run: str) -> RunFolder:
        """Return the folder of a run. Raises RefusedError if there is no run of this name."""
        return self.folder.run(self.find(run).run)

    def list_policies(self, run: str) -> tuple[str, ...]:
        """Return the names of a run's policies."""
        return tuple(SwarmJob.build(self.find(run).job).policies)

    def is_active(self, run: str) -> bool:
        """Return whether a run is queued or has a process."""
        record = self._ledger.get(run)
        return record is not None and (record.is_running or record.state == "queued")

    # --------------------------------------------------------------------------------------------- changing

    async def launch(self, request: LaunchRequest, *, owner: str, is_admin: bool) -> RunView:
        """Queue a job, and start it if there is room. A request that was carried out before changes nothing.

        Raises SwarmqError, and changes nothing, for a job that cannot run here, a name that is taken, and a full host.
        """
        digest = hashlib.sha256(msgspec.json.encode(request, order="deterministic")).hexdigest()
        async with self._launching:
            if known := self._ledger.find_request(request.request_id):
                if known.digest != digest:
                    raise RefusedError(
                        f"request_id: {request.request_id!r} was used for another launch, of run {known.run!r}: choose another",
                        status=409,
                        code="request_conflict",
                        param="request_id",
                    )
                return self.show_run(known.run)
            checked = await self._check_job(request.job, request.gpus, is_admin=is_admin)
            run = checked.job.run
            self._check_name(run)
            record = RunRecord(
                run=run,
                job=msgspec.to_builtins(checked.job),
                request_id=request.request_id,
                digest=digest,
                owner=owner,
                launched_at=self._now(),
                queued_at=self._now(),
                num_gpus=checked.num_gpus,
            )
            self._check_room(record, can_wait=request.can_wait)
            self._put(record)
            log.info("run_launched", run=run, owner=owner)
            self._start_queued()
            return self.show_run(run)

    async def check(self, job: dict[str, Any], gpus: int | None, *, is_admin: bool) -> CheckedJob:
        """Return what `swarmq up` would do with the job here. Raises SwarmqError if a launch would be refused because of the job."""
        checked = await self._check_job(job, gpus, is_admin=is_admin)
        self._check_name(checked.job.run)
        return checked

    def stop(self, run: str, *, now: bool) -> RunView:
        """Stop a run: its learners write a checkpoint, and its GPUs get free. `now`: end one that is stopping, without its checkpoint."""
        record = self.find(run)
        if record.state == "queued":
            self._put(msgspec.structs.replace(record, state="stopped"))
        elif record.state == "running" or (record.state == "stopping" and now):
            # The signal comes first: a daemon that is killed in between has not answered, and the client asks again.
            if process := self._processes.get(run):
                process.send(signal.SIGTERM)
            self._put(msgspec.structs.replace(record, state="stopping", detail=""))
        return self.show_run(run)

    async def resume(self, run: str, request: ResumeRequest, *, sender: str, is_admin: bool) -> RunView:
        """Continue a run: one that is up goes on after a pause or drain, any other one is queued again, with changed settings.

        Raises SwarmqError, and changes nothing, if its settings do not let it continue.
        """
        record, state = self.find(run), self._state(self.find(run))
        if state == "up" and not request.settings:
            await self.act(run, "resume", sender=sender)
            return self.show_run(run)
        if state in {"queued", "starting", "up"}:
            job = SwarmJob.build(record.job)
            if live_settings.change_job(job, request.settings) != job:
                raise _wrong_state(f"run {run!r} is {state}: change it with `set`, or stop it first")
            return self.show_run(run)  # the request was carried out, and is repeated
        if state == "stopping":
            raise _wrong_state(f"run {run!r} is stopping: resume it when it is stopped")
        async with self._launching:
            job = live_settings.change_job(SwarmJob.build(record.job), request.settings)
            if job.run != run:
                raise RefusedError(f"run: the run is {run!r} and keeps its name", param="run")
            checked = await self._check_job(
                msgspec.to_builtins(job),
                record.num_gpus or None,
                is_admin=is_admin or job == SwarmJob.build(record.job),
            )
            self._check_not_ended(checked.job, record)
            record = self.find(run)
            if record.is_running or record.state == "queued":  # resumed by another request meanwhile
                return self.show_run(run)
            again = msgspec.structs.replace(
                record, job=msgspec.to_builtins(checked.job), state="queued", queued_at=self._now(), detail="", gpus=()
            )
            self._put(again)
            self._start_queued()
            return self.show_run(run)

    async def act(self, run: str, action: str, *, sender: str, **fields: Any) -> ActionAnswer:
        """Change a run that is up. Raises SwarmqError if the run refuses it or is not up."""
        record = self.find(run)
        if (state := self._state(record)) != "up":
            raise _wrong_state(f"run {run!r} is {state}: {action} needs a run that is up")
        request = msgspec.convert({"action": action, **fields}, actions.Request)
        return ActionAnswer(text=await actions.act(self.folder.run(run).path, request, sender=sender))

    def invite(self, run: str, name: str) -> str:
        """Invite a client that reaches the run's proxies over HTTP, and return its invite. Raises SwarmqError if the name was used."""
        if (state := self._state(self.find(run))) != "up":
            raise _wrong_state(f"run {run!r} is {state}: an invite needs a run that is up")
        folder = self.folder.run(run)
        management = find_management_api(load_live_run(folder.path), folder)
        return add_client(folder, find_invite(folder.path), name, management, ClientAddresses(http=True)).encode()

    async def feed(self, run: str, request: TasksRequest) -> TasksAnswer:
        """Feed tasks to a run that is up. Raises SwarmqError, before any task is fed, for a wrong kind or task."""
        if (state := self._state(self.find(run))) != "up":
            raise _wrong_state(f"run {run!r} is {state}: tasks need a run that is up")
        folder = self.folder.run(run)
        tasks = [SwarmTask(one.id, one.kind, one.payload) for one in request.tasks]
        async with self._feeding[run]:  # a request that is repeated waits for the first one, and continues after it
            if request.for_eval:
                fed = await feed_evaluation(
                    folder, tasks, request.kind, option="kind", source=request.source, repeats=request.repeats
                )
            else:
                fed = await feed_training(
                    folder,
                    tasks,
                    request.kind,
                    option="kind",
                    source=request.source,
                    repeats=request.repeats,
                    epochs=request.epochs,
                    seed=request.seed,
                    restart=request.restart,
                )
        return TasksAnswer(kind=fed.kind, fed=fed.published)

    async def delete(self, run: str) -> None:
        """Remove a run that has no process, with its folder."""
        record = self.find(run)
        if record.is_running:
            raise _wrong_state(f"run {run!r} is {self._state(record)}: stop it first")
        path = self.folder.run(run).path
        self.folder.deleted.mkdir(exist_ok=True)
        doomed = self.folder.deleted / f"{run}-{record.launched_at}"
        with contextlib.suppress(FileNotFoundError):  # it never started, or a killed daemon had begun to delete it
            path.rename(doomed)
        self._ledger.remove(run)
        self._deaths.pop(run, None)
        self._announce()
        log.info("run_deleted", run=run)
        await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ inside

    async def _check_job(self, job: dict[str, Any], gpus: int | None, *, is_admin: bool) -> CheckedJob:
        return await asyncio.to_thread(self._check.check, job, gpus=gpus, is_admin=is_admin)

    def _check_name(self, run: str) -> None:
        if known := self._ledger.get(run):
            raise RefusedError(
                f"run: {run!r} is a run of this host already, launched by {known.owner}: choose another name, or resume that run",
                status=409,
                code="run_exists",
                param="run",
            )
        if (path := self.folder.run(run).path).exists():
            raise RefusedError(
                f"run: {path} exists, and was not made by this daemon: choose another name",
                status=409,
                code="run_exists",
                param="run",
            )

    def _check_room(self, record: RunRecord, *, can_wait: bool) -> None:
        startable = choose_startable(
            [*self._ledger, record], num_gpus=len(self._check.gpus), most_running=self._most_running
        )
        queued = len(list_queued(self._ledger))
        if record in [one for one, _ in startable] or (can_wait and queued < self._most_queued):
            return
        up = ", ".join(one.run for one in self._ledger if one.is_running) or "none"
        waiting = ", ".join(one.run for one in list_queued(self._ledger)) or "none"
        what_to_do = "launch again when a run has ended" if can_wait else "the launch may not wait (can_wait)"
        raise RefusedError(
            f"the host is full: runs that are up: {up}; queued: {waiting}; {what_to_do}",
            status=429,
            code="host_full",
        )

    def _check_not_ended(self, job: SwarmJob, record: RunRecord) -> None:
        row = self._read_row(record)
        steps = {policy: row.policies[policy].step if row else 0 for policy in job.trained}
        ended = describe_ended_policies(job, steps)
        if len(ended) == len(job.trained):
            settings = " or ".join(f"policies.{policy}.train.max_steps" for policy in job.trained)
            raise _wrong_state(
                f"run {job.run!r} has made its last step ({', '.join(f'{name} {step}' for name, step in steps.items())}): "
                f"resume it with a larger {settings}"
            )

    def _start_queued(self) -> None:
        for record, gpus in choose_startable(
            self._ledger, num_gpus=len(self._check.gpus), most_running=self._most_running
        ):
            self._start(record, gpus)

    def _start(self, record: RunRecord, gpus: tuple[int, ...]) -> None:
        run, folder = record.run, self.folder.run(record.run)
        try:
            if is_locked(folder.lock):
                raise SwarmqError(f"process {folder.lock.read_text()} keeps it up, which this daemon has not started")
            make_folder(folder.logs)
            folder.path.chmod(0o700)
            write_atomically(folder.job, SwarmJob.build(record.job).to_toml().encode())
            output = self.folder.log(run)
            started = msgspec.structs.replace(
                record,
                state="running",
                gpus=gpus,
                started_at=self._now(),
                log_start=output.stat().st_size if output.exists() else 0,
            )
            self._put(started)
            process = self._launcher.start(run, gpus)
        except (OSError, SwarmqError) as error:
            log.warning("run_not_started", run=run, reason=str(error))
            self._put(msgspec.structs.replace(record, state="failed", gpus=(), detail=f"not started: {error}"))
        else:
            log.info("run_started", run=run, gpus=gpus)
            self._keep(run, process)

    def _keep(self, run: str, process: RunProcess) -> None:
        self._processes[run] = process
        task = self._tasks.create_task(self._wait_for_end(run, process))
        self._keepers.add(task)
        task.add_done_callback(self._keepers.discard)

    async def _wait_for_end(self, run: str, process: RunProcess) -> None:
        await process.wait()
        del self._processes[run]
        while True:
            try:
                self._settle(self.find(run))
                self._start_queued()
            except OSError as error:  # a full disk: what is not on disk yet is written by the next try
                log.warning("run_end_not_recorded", run=run, reason=str(error), action="tried again")
                await asyncio.sleep(POLL_S)
            else:
                return

    def _settle(self, record: RunRecord) -> None:
        """Record the end of a run's process, and queue the run again if it did not end by itself."""
        if not record.is_running:
            return
        output = self.folder.log(record.run)
        message, row = read_final_message(output, record.log_start), self._read_row(record)
        ended = msgspec.structs.replace(record, gpus=(), detail=message)
        if record.state == "stopping":
            ended = msgspec.structs.replace(ended, state="stopped")
        elif message:
            ended = msgspec.structs.replace(ended, state="failed")
        elif row and "ended" in row.state.split(", "):
            ended = msgspec.structs.replace(ended, state="done")
        elif self._deaths.setdefault(record.run, DeathCounter(DEATH_WINDOW_S)).record_death() < MAX_DEATHS:
            ended = msgspec.structs.replace(
                ended,
                state="queued",
                restarts=record.restarts + 1,
                detail="its process died, and the run was started again",
            )
        else:
            text = f"its process died {MAX_DEATHS} times within {DEATH_WINDOW_S:.0f} s; the end of its log:\n{read_tail(output)}"
            ended = msgspec.structs.replace(ended, state="failed", detail=text)
        log.info("run_ended", run=record.run, state=ended.state, detail=ended.detail)
        self._put(ended)

    def _put(self, record: RunRecord) -> None:
        self._ledger.put(record)
        self._announce()

    def _announce(self) -> None:
        """Wake the requests that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _state(self, record: RunRecord) -> RunState:
        if record.state != "running":
            return record.state
        try:
            is_up = self.folder.run(record.run).invite.stat().st_mtime >= (record.started_at or 0.0)
        except OSError:
            is_up = False
        return "up" if is_up else "starting"

    def _read_row(self, record: RunRecord) -> RunRow | None:
        """Return the progress of a run; None if it has none that can be read."""
        try:
            return read_row(self.folder.run(record.run), self._progress)
        except OSError:
            return None

    def _show_policies(self, record: RunRecord, progress: dict[str, PolicyProgress]) -> dict[str, PolicyView]:
        changes = collector_ledger.read_changes(self.folder.run(record.run).inbox)
        job = live_settings.apply_changes(SwarmJob.build(record.job), changes)
        found = {policy: progress.get(policy, PolicyProgress()) for policy in job.trained}
        return {
            policy: PolicyView(step=one.step, max_steps=job.policies[policy].train.max_steps, reward=one.reward)
            for policy, one in found.items()
        }


def _wrong_state(text: str) -> RefusedError:
    return RefusedError(text, status=409, code="wrong_state")
