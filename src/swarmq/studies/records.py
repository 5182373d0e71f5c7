"""What happened in a study: the facts of its ledger, one line of JSON each. The ledger is the truth; all else is computed from it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swarmq.studies.study import Study


class Spending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a trial has spent, or may spend."""

    gpu_seconds: float = 0.0
    """Seconds of the trial by the worker's monotonic clock, times its GPUs."""
    calls: int = 0
    money: float = 0.0


class Trial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One training of one arm with one seed, up to one number of steps."""

    id: str
    """Hash of all that the result depends on: settings, code, data, model, seed, steps. Equal trials have equal ids."""
    arm: str
    seed: int
    settings: dict[str, Any]
    """All settings of the trial by path, those that arms share included."""
    agent: str = ""
    tasks: str = ""
    steps: int = 0
    """Step at which the trial stops; 0: as its job says."""
    rung: int = 0
    lineage: str
    """Hash that trials of one arm and seed share on all rungs. They share a folder, so that a promoted trial continues."""
    purpose: Literal["compare", "noise"] = "compare"
    """`noise`: an A/A trial, the baseline with a seed of its own, which is not part of the comparison of arms."""
    code: str = ""
    """Hash of the code."""
    data: str = ""
    """Hash of the tasks, held-out ones included."""
    model: str = ""
    """Hash of the model's files, or its name on a hub."""
    files: dict[str, str] = {}
    """Files beside the study file that have another content for this trial."""

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}" + (f", rung {self.rung}" if self.rung else "")


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", omit_defaults=True):
    """Base of all facts."""


class StudyOpened(Fact, frozen=True, kw_only=True, tag="opened"):
    """The study was opened, before its first trial."""

    study: Study
    digest: str
    """Hash of the study file."""
    inputs: str
    """Hash of the code, tasks and models of all arms."""


class StudyAmended(Fact, frozen=True, kw_only=True, tag="amended"):
    """The study file was changed after the study was opened."""

    study: Study
    digest: str
    inputs: str
    reason: str


class TrialPlanned(Fact, frozen=True, kw_only=True, tag="planned"):
    """The design has decided on a trial."""

    trial: Trial


class TrialStarted(Fact, frozen=True, kw_only=True, tag="started"):
    """A worker was given a trial, and its costs were reserved. The entry's number is the fencing token of the lease."""

    trial_id: str
    worker: str
    """`host:process` of the worker."""
    claim_id: str
    copy_id: str
    """Id of the message by which the worker holds the lease."""
    reserved: Spending


def host_of(worker: str) -> str:
    """Return the host of a worker, whose name is `host:process`."""
    return worker.rpartition(":")[0]


class TrialResult(Fact, frozen=True, kw_only=True, tag="result"):
    """A trial has ended with a result: exactly one for each trial. Its costs replace what was reserved."""

    trial_id: str
    fence: int
    metrics: dict[str, float]
    curves: dict[str, tuple[float, ...]] = {}
    """Metric -> its values, one for each step."""
    scores: dict[str, float] = {}
    """Held-out task -> mean reward after training, for pairs by task."""
    cost: Spending


class TrialFailed(Fact, frozen=True, kw_only=True, tag="failed"):
    """A start of a trial has ended without a result. It is never counted as one."""

    trial_id: str
    fence: int
    kind: Literal["failure", "timeout", "lost", "returned"]
    """`failure`: the trial's process broke. `timeout`: the trial was killed at its time limit. `lost`: the worker or its host died.
    `returned`: the worker was stopped. The first two count towards the study's `max_failures`."""
    reason: str
    log: str = ""
    """Last lines of the trial's output."""
    cost: Spending
    """Costs up to the failure; for a lost worker an upper bound."""


class TrialParked(Fact, frozen=True, kw_only=True, tag="parked"):
    """A trial was given up after too many failures; it has no result."""

    trial_id: str
    reason: str
    log: str = ""


class Promoted(Fact, frozen=True, kw_only=True, tag="promoted"):
    """An arm goes on to the next rung. `rank`: its place among the `of` arms that have results at the rung."""

    arm: str
    rung: int
    """Rung that the arm enters."""
    rank: int
    of: int


class Looked(Fact, frozen=True, kw_only=True, tag="looked"):
    """The results so far were looked at, as the stopping rule says."""

    look: int
    num_results: int
    figures: dict[str, float]
    decision: Literal["continue", "stop"]
    reason: str


class StudyStopped(Fact, frozen=True, kw_only=True, tag="stopped"):
    """No further trial starts."""

    kind: Literal["complete", "budget", "rule", "asked"]
    reason: str


class StudyResumed(Fact, frozen=True, kw_only=True, tag="resumed"):
    """A stopped study goes on, after an amendment or on request. Parked trials are started again."""

    reason: str


class PlannerAsked(Fact, frozen=True, kw_only=True, tag="planner_asked"):
    """What was sent to the planner."""

    prompt: str
    reserved: Spending = Spending()
    """The most that the answer may cost. It counts as spent if the leader died before it had the answer."""


class PlannerAnswered(Fact, frozen=True, kw_only=True, tag="planner_answered"):
    """What the planner answered, word for word."""

    answer: str
    cost: Spending


class PlannerDecided(Fact, frozen=True, kw_only=True, tag="planner_decided"):
    """What became of a proposal of the planner."""

    arm: str
    settings: dict[str, Any] = {}
    diff: str = ""
    """Change of files that the planner may change, for people."""
    files: dict[str, str] = {}
    """The changed files, whole."""
    decision: Literal["accepted", "refused", "waiting"]
    reason: str
    """Why it was refused; for an accepted one the hypothesis."""
    by: str = "rule"
    """`rule`, or the name of the person who decided."""


class NoteWritten(Fact, frozen=True, kw_only=True, tag="note"):
    """A note of the planner or of a person."""

    by: str
    text: str


AnyFact = (
    StudyOpened
    | StudyAmended
    | TrialPlanned
    | TrialStarted
    | TrialResult
    | TrialFailed
    | TrialParked
    | Promoted
    | Looked
    | StudyStopped
    | StudyResumed
    | PlannerAsked
    | PlannerAnswered
    | PlannerDecided
    | NoteWritten
)


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the ledger."""

    number: int
    """Number of the entry, from 1."""
    at: float
    """Unix time, for people. Nothing is decided by it."""
    elapsed_s: float
    """Seconds for which leaders of the study have run, by their monotonic clocks."""
    previous: str
    """Hash of the line before, so that a changed or missing line is found."""
    fact: AnyFact
    is_continued: bool = False
    """Whether the next line belongs to the same decision: neither counts without the other."""
