"""`swarmq.launch`: a run on another host as an object.

run = swarmq.launch(job, host="https://gpu-box:7000", token=token)
run.wait("up")
with swarmq.SwarmClient(run.invite("laptop")) as client:
    client.run_episodes_until_all_complete(tasks, attempt)
run.set({"policies.main.train.learning_rate": 1e-6})
run.stop()
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import msgspec

from swarmq.client.data.tasks import SwarmTask
from swarmq.config import SwarmJob
from swarmq.errors import HostError, TaskError
from swarmq.keys import Invite
from swarmq.messages import new_id
from swarmq.remote.client import HostClient
from swarmq.remote.records import (
    FINAL,
    UP_LOG,
    ActionAnswer,
    FileView,
    InviteAnswer,
    LiveAction,
    RunState,
    RunView,
    SentTask,
    TasksAnswer,
    TasksRequest,
)

FEED_S = 3600.0
"""Seconds that feeding a data set may take."""
WAIT_S = 20.0
"""Seconds that one request waits for a change of a run's state, after which it is repeated."""


def launch(
    job: SwarmJob | Mapping[str, Any] | str | Path,
    *,
    host: str | HostClient,
    token: str | None = None,
    gpus: int | None = None,
    can_wait: bool = True,
    request_id: str | None = None,
) -> RemoteRun:
    """Launch a job on a host that runs `swarmq host serve`, and return its run.

    `job`: the job, its settings as a mapping, or the path of a job file. `host`, `token`: as for `HostClient`. `gpus`: number of GPUs that
    the run gets; None: all of the host. `can_wait`: whether the run may wait in the host's queue. `request_id`: id of this launch;
    the same launch under the same id is the same run, so a script that is started again finds its run.

    Raises ConfigError for settings that are wrong anywhere, and HostError with the path of the setting (`param`) if the host refuses the
    job; then nothing has started.
    """
    if isinstance(job, str | Path):
        job = SwarmJob.load(job)
    # built again because a record that was made in Python may have values that no job file could have
    checked = SwarmJob.build(dict(job) if isinstance(job, Mapping) else msgspec.to_builtins(job), origin="job")
    client = host if isinstance(host, HostClient) else HostClient(host, token=token)
    body = {
        "job": msgspec.to_builtins(checked),
        "request_id": request_id or new_id(),
        "gpus": gpus,
        "can_wait": can_wait,
    }
    view = client.ask("POST", "/v1/runs", RunView, body=body)
    return RemoteRun(client, view.run)


class RemoteRun:
    """A run of a host. All methods raise HostError if the host refuses or cannot be reached."""

    def __init__(self, host: HostClient, name: str) -> None:
        self.host, self.name = host, name
        self._path = f"/v1/runs/{name}"

    def __repr__(self) -> str:
        return f"RemoteRun({self.host.address!r}, {self.name!r})"

    def status(self) -> RunView:
        """Return the state and progress of the run."""
        return self.host.ask("GET", self._path, RunView)

    def wait(self, state: RunState = "done", *, timeout_s: float = float("inf")) -> RunView:
        """Wait until the run is in this state.

        Raises HostError if the run ends in another state, or if `timeout_s` seconds pass.
        """
        until, view = time.monotonic() + timeout_s, self.status()
        while view.state != state:
            if view.state in FINAL:
                raise HostError(
                    f"run {self.name!r} is {view.state} and will not be {state}: {view.detail or 'no reason is known'}"
                )
            if (left := until - time.monotonic()) <= 0:
                raise HostError(f"run {self.name!r} is {view.state}, and not {state} after {timeout_s:g} s")
            view = self.host.ask("GET", self._path, RunView, unlike=view.state, wait_s=min(left, WAIT_S))
        return view

    def set(self, settings: Mapping[str, Any]) -> str:
        """Change settings of the run while it is up, by their paths, and return from which step on they hold."""
        return self._act("set", settings=settings)

    def pause(self) -> str:
        """Pause training, and issue no tickets; `resume` continues."""
        return self._act("pause")

    def drain(self) -> str:
        """Issue no tickets, and train the episodes that have begun; `resume` continues."""
        return self._act("drain")

    def checkpoint(self) -> str:
        """Write a checkpoint of every trained policy."""
        return self._act("checkpoint")

    def stop(self, *, now: bool = False) -> RunView:
        """Stop the run: its learners write a checkpoint, then its GPUs are free; `wait("stopped")` waits for it.

        `now`: end a run that is stopping without its checkpoint.
        """
        return self.host.ask("POST", f"{self._path}/stop", RunView, body={"now": now})

    def resume(self, settings: Mapping[str, Any] | None = None) -> RunView:
        """Continue the run: after a pause, or, if it is not up, from its newest checkpoint, with changed `settings`."""
        return self.host.ask("POST", f"{self._path}/resume", RunView, body={"settings": settings or {}})

    def invite(self, name: str | None = None) -> Invite:
        """Invite a client for this machine, e.g. `SwarmClient(run.invite())`; it reaches the run's proxies over HTTP.

        `name`: name of the client, used once; None: a new one. Over ssh the invite holds as long as this object's tunnel is open.
        """
        body = {"name": name or f"remote-{secrets.token_hex(4)}"}
        answer = self.host.ask("POST", f"{self._path}/clients", InviteAnswer, body=body)
        invite = Invite.decode(answer.invite)
        if self.host.tunnel is None:
            return invite
        proxy = urlsplit(invite.base_url)
        assert proxy.hostname
        assert proxy.port
        port = self.host.tunnel.forward(proxy.hostname, proxy.port)
        return msgspec.structs.replace(invite, base_url=f"{proxy.scheme}://127.0.0.1:{port}/v1", base_urls=())

    def feed(
        self,
        tasks: Iterable[SwarmTask],
        *,
        source: str,
        kind: str | None = None,
        repeats: int | None = None,
        epochs: int = 1,
        seed: int | None = None,
        restart: bool = False,
        for_eval: bool = False,
    ) -> TasksAnswer:
        """Put tasks on the queue of a kind, like `swarmq feed`; workers attempt them. The run must be up.

        `source`: name of the data set, at most 64 letters, digits, dots, underscores and hyphens. The same tasks of a source are fed once, however
        often they are sent, until `restart`. `kind`: None: the only kind. `repeats`: attempts per task and epoch; None: the group size. `seed`: shuffle each epoch.
        `for_eval`: use the tasks for evaluation rounds instead.
        """
        body = TasksRequest(
            tasks=tuple(SentTask(id=one.id, kind=one.kind, payload=one.payload) for one in tasks),
            source=source,
            kind=kind,
            repeats=repeats,
            epochs=epochs,
            seed=seed,
            restart=new_id() if restart else "",
            for_eval=for_eval,
        )
        try:
            return self.host.ask("POST", f"{self._path}/tasks", TasksAnswer, body=body, timeout_s=FEED_S)
        except TypeError as error:
            raise TaskError(f"{source}: the data of a task cannot be sent as JSON: {error}") from error

    def board(self) -> dict[str, Any]:
        """Return everything about the run's present state, as `swarmq status --json` prints it."""
        return self.host.ask("GET", f"{self._path}/board", dict[str, Any])

    def logs(self, name: str = UP_LOG, *, lines: int = 400, follow: bool = False) -> Iterator[str]:
        """Yield the last lines of a log and, with `follow`, the lines that are appended, until the run has ended."""
        rest = b""
        for piece in self.host.stream(f"{self._path}/logs/{name}", lines=lines, follow=follow):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")

    def list_logs(self) -> list[str]:
        """Return the names of the logs."""
        return [one.path for one in self.host.ask("GET", f"{self._path}/logs", list[FileView])]

    def files(self, under: str = "") -> list[FileView]:
        """Return the files of the run below a path in its folder: checkpoints, batch logs, transcripts, events, logs."""
        return self.host.ask("GET", f"{self._path}/files", list[FileView], under=under)

    def download(self, path: str, to: str | Path) -> list[Path]:
        """Copy a file of the run to the path `to`, or a folder with all of its files, and return the copies.

        A file that was copied in part by an earlier call is continued.
        """
        found = self.files(path)
        if not found:
            raise HostError(f"run {self.name!r} has no file {path}: `files()` lists them")
        copies = []
        for file in found:
            within = PurePosixPath(file.path).relative_to(path)
            if ".." in within.parts:
                raise HostError(f"{self.host.address}: {file.path!r} is not the path of a file")
            copies.append(Path(to, within))
            self._copy(file, copies[-1])
        return copies

    def _copy(self, file: FileView, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        part = to.with_name(f"{to.name}.part")
        with part.open("ab") as copy:
            while (done := copy.tell()) < file.size_bytes:
                for piece in self.host.stream(f"{self._path}/files/{file.path}", offset=done):
                    copy.write(piece)
                if copy.tell() == done:
                    raise HostError(f"{self.host.address}: {file.path} has become shorter: copy it again")
        part.replace(to)

    def delete(self) -> None:
        """Remove the run from the host, with its checkpoints and logs. It must not be up."""
        self.host.ask("DELETE", self._path, type(None))

    def _act(self, action: LiveAction, **fields: Any) -> str:
        return self.host.ask("POST", f"{self._path}/actions", ActionAnswer, body={"action": action, **fields}).text
