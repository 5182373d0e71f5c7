"""What a host's daemon and its clients send to each other, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swarmq.messages import NAME

RunState = Literal["queued", "starting", "up", "stopping", "stopped", "done", "failed"]
"""`queued` until the host has room; `done` after the last step of every learner; `failed` with the reason in `detail`."""
FINAL: tuple[RunState, ...] = ("stopped", "done", "failed")
"""States in which no process of the run is left."""
UP_LOG = "up.log"
"""Log with the output of a run's `swarmq up`."""
SIZE_HEADER = "x-swarmq-size"
"""Header with the size of the whole file in an answer with a piece of it."""
LiveAction = Literal["pause", "drain", "checkpoint", "set", "revoke"]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies that clients send."""


class LaunchRequest(Request, frozen=True, kw_only=True):
    """A job to run. The same request under the same id launches one run, however often it is sent."""

    job: dict[str, Any]
    """Settings of the job, as in a job file."""
    request_id: Annotated[str, Meta(pattern=r"^[0-9A-Za-z._:-]{1,64}$")]
    """Id of this launch, chosen by the client."""
    gpus: Annotated[int, Meta(ge=1)] | None = None
    """Number of GPUs that the run gets; None: all GPUs of the host."""
    can_wait: bool = True
    """Whether the run may wait in the queue; false: refuse it if it cannot start at once."""


class CheckRequest(Request, frozen=True, kw_only=True):
    """A job to check, without starting anything."""

    job: dict[str, Any]
    gpus: Annotated[int, Meta(ge=1)] | None = None


class StopRequest(Request, frozen=True, kw_only=True):
    """A run to stop. Its learners write a checkpoint first."""

    now: bool = False
    """Stop a run that is stopping without its checkpoint; the steps since the last one are trained again from the batch log."""


class ResumeRequest(Request, frozen=True, kw_only=True):
    """A run to continue."""

    settings: dict[str, Any] = {}
    """Path -> new value of a setting of the job, e.g. a larger `policies.main.train.max_steps`; only for a run that is not up."""


class ActionRequest(Request, frozen=True, kw_only=True):
    """A change of a run that is up."""

    action: LiveAction
    settings: dict[str, Any] = {}
    """Path -> value, for `set`."""
    client: str = ""
    """Client to revoke."""


class InviteRequest(Request, frozen=True, kw_only=True):
    """A client to invite, which reaches the run by HTTP alone."""

    name: Annotated[str, Meta(pattern=f"^{NAME.pattern}$")]


class InviteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    invite: str
    """One line of text, as `swarmq client add` prints it."""


class SentTask(Request, frozen=True, kw_only=True):
    """A task to attempt."""

    id: str
    kind: str | None = None
    payload: Any = None


class TasksRequest(Request, frozen=True, kw_only=True):
    """Tasks of a data set, for the queue of a kind. The same tasks are fed once, however often they are sent, and once more for each id of
    a restart."""

    tasks: tuple[SentTask, ...]
    kind: str | None = None
    """None: the only kind of the job."""
    source: Annotated[str, Meta(pattern=r"^[0-9A-Za-z._-]{1,64}$")]
    """Mark of the data set, which distinguishes its ids from those of other data sets."""
    repeats: Annotated[int, Meta(ge=1)] | None = None
    """Attempts per task and epoch; None: the group size of the kind."""
    epochs: Annotated[int, Meta(ge=1)] = 1
    seed: int | None = None
    """Seed by which each epoch is shuffled; None: in the order of `tasks`."""
    restart: Annotated[str, Meta(pattern=r"^[0-9A-Za-z._:-]{0,64}$")] = ""
    """Id of a restart: begin again instead of continuing after what was fed before. The same id, sent again, continues."""
    for_eval: bool = False
    """Use the tasks for evaluation rounds, never for training; they replace those of the same `source`."""


class TasksAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was fed."""

    kind: str
    fed: int
    """Number of published attempts; for evaluation, number of tasks."""


class FileView(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a run."""

    path: str
    """Path in the run folder."""
    size_bytes: int


class ActionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of the run's collector and learners, a line each."""

    text: str


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one trained policy."""

    step: int
    max_steps: int
    """Last step; 0: none."""
    reward: float | None
    """Mean reward of the newest step."""


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a host. Times are Unix seconds."""

    run: str
    state: RunState
    pace: str
    """`running`, `paused` or `draining`."""
    detail: str
    """Why the run failed, or was started again; empty if there is nothing to say."""
    policies: dict[str, PolicyView]
    position: int | None
    """Place in the queue, from 1; None if the run is not queued."""
    gpus: tuple[int, ...]
    """Numbers of the host's GPUs that the run holds."""
    owner: str
    """Name of the operator who launched it."""
    request_id: str
    launched_at: float
    started_at: float | None
    restarts: int
    """How often the run was started again after it had died."""


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What `swarmq up` would do with a job on this host."""

    run: str
    lines: tuple[str, ...]
    """Placement, context limits and warnings."""


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """A host that takes jobs."""

    host: str
    version: str
    gpus: int
    most_running: int
    """Maximum number of runs at the same time."""
    running: tuple[str, ...]
    queued: tuple[str, ...]
