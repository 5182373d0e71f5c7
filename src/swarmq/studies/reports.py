"""What workers tell the leader, in the body of a `TrialReport`, and how the leader answers.

leader --TrialOffer--> trials: held unacknowledged by one worker until the trial has ended
worker --Greeting-->   reports    leader --event "lease"--> welcome, once there is a queue for trials that only this host shall run
worker --Claim-->   reports    leader --event "lease"--> run, wait, drop or stop
worker --Beat-->    reports    ... while the trial runs
worker --TrialResult, TrialFailed--> reports; then the worker acknowledges the offer
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarmq.broker import topology
from swarmq.errors import MessageError
from swarmq.messages import TrialReport, new_id
from swarmq.studies.records import PlannerDecided, StudyStopped, TrialFailed, TrialResult
from swarmq.studies.study import Study, hash_json

RUN_PREFIX = "study-"
KIND = "trials"
LEASE_EVENT: Literal["lease"] = "lease"
PIECE_EVENT: Literal["piece"] = "piece"
SOURCE = "study"
READER_PREFIX = "files-"

LeaseVerdict = Literal["welcome", "run", "wait", "drop", "stop", "differs", "revoked"]
"""`welcome`: there is a leader. `run`: the trial is leased to this worker. `wait`: ask again later. `drop`: the trial needs no further start; forget the offer.
`stop`: no further trial starts. `differs`: the worker's files or study are not the leader's. `revoked`: the lease has ended, so the
trial must."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="greeting"):
    """A worker asks whether there is a leader."""

    claim_id: str
    host: str


class FileWanted(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="file_wanted"):
    """A worker without the study's folder asks for a piece of a file (shared_files.py)."""

    reader: Annotated[str, msgspec.Meta(pattern=rf"^{READER_PREFIX}[0-9a-f-]+$", max_length=64)]
    """Source of the event with the answer, so that no other worker gets it."""
    path: str
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="claim"):
    """A worker holds the offer of a trial and asks for the lease. A repeated claim keeps its id."""

    claim_id: str
    trial_id: str
    copy_id: str
    worker: str
    terms: str
    """Hash of what the worker would run, and within which limits (`hash_terms`)."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="beat"):
    """A sign of life of a trial that runs."""

    claim_id: str
    trial_id: str
    fence: int
    used_s: float
    """Seconds since the trial's start, by the worker's monotonic clock."""


Report = Greeting | FileWanted | Claim | Beat | TrialResult | TrialFailed | StudyStopped | PlannerDecided


def hash_terms(study: Study, lineage: str) -> str:
    """Return the hash of what leader and worker must agree about before a trial starts: its inputs, limits, metric and lease."""
    return hash_json([lineage, study.trial, study.metric.name, study.lease_s])


def run_of(name: str) -> str:
    """Return the name under which a study has its queues."""
    return f"{RUN_PREFIX}{name}"


def parse_run(run: str) -> str:
    """Return the study that has its queues under this name, or "" if no study has."""
    return run.removeprefix(RUN_PREFIX) if run.startswith(RUN_PREFIX) else ""


def kind_of(host: str) -> str:
    """Return the kind of task whose queue holds the trials that only workers of this host shall run."""
    return f"{KIND}.{host}"


def offers(name: str, host: str = "") -> str:
    """Return the queue of trials, or that of one host."""
    return topology.tasks(run_of(name), kind_of(host) if host else KIND)


def inbox(name: str) -> str:
    """Return the queue of reports to the leader."""
    return topology.inbox(run_of(name))


def pack(name: str, report: Report) -> TrialReport:
    return TrialReport(run=run_of(name), report_id=new_id(), body=msgspec.json.encode(report))


def unpack(message: TrialReport) -> Report:
    """Return the report. Raises MessageError."""
    try:
        report: Report = msgspec.json.decode(message.body, type=Report)
    except msgspec.MsgspecError as error:
        raise MessageError(f"report {message.report_id} of {message.run}: {error}") from error
    return report
