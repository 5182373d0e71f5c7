"""What a ledger says about a study now: its trials, leases and costs. Pure: the same entries give the same state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from swarmq.studies.records import (
    Entry,
    Looked,
    PlannerAnswered,
    PlannerAsked,
    PlannerDecided,
    Promoted,
    Spending,
    StudyAmended,
    StudyOpened,
    StudyResumed,
    StudyStopped,
    Trial,
    TrialFailed,
    TrialParked,
    TrialPlanned,
    TrialResult,
    TrialStarted,
    host_of,
)
from swarmq.studies.study import KILL_S, Arm, Study

AMENDED = "it was planned with a job, code, tasks or a model that were amended since"
REMOVED = "the amended study has no such arm, seed or rung"
COUNTED = ("failure", "timeout")
"""Kinds of failures that count towards `max_failures`."""


class TrialState(msgspec.Struct, kw_only=True):
    """What became of a trial so far."""

    trial: Trial
    lease: TrialStarted | None = None
    fence: int = 0
    """Fencing token of the newest lease."""
    claims: set[str] = msgspec.field(default_factory=set)
    """Claims that have had a lease."""
    result: TrialResult | None = None
    num_failures: int = 0
    num_lost: int = 0
    parked: TrialParked | None = None

    @property
    def status(self) -> Literal["done", "parked", "running", "waiting"]:
        return "done" if self.result else "parked" if self.parked else "running" if self.lease else "waiting"

    @property
    def is_settled(self) -> bool:
        """Whether the trial has a result or will have none."""
        return self.result is not None or self.parked is not None


class StudyState:
    """The fold of a ledger's entries."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.study: Study | None = None
        self.inputs = ""
        self.trials: dict[str, TrialState] = {}
        """Trials by id, in the order in which they were planned."""
        self.hosts: dict[str, str] = {}
        """Lineage -> host that ran its newest start, and has its checkpoint."""
        self.promoted: list[Promoted] = []
        self.looks: list[Looked] = []
        self.spent = Spending()
        """Costs of all starts that have ended."""
        self.num_starts = 0
        self.stopped: StudyStopped | None = None
        self.proposed: dict[str, PlannerDecided] = {}
        """Newest decision on each arm of the planner, refused ones included."""
        self.asked = Spending()
        """What the answer of the planner may cost that is awaited."""
        self.answer: str | None = None
        """Answer of the planner that was not judged yet."""
        self.idle_rounds = 0
        """Answers in a row of which nothing was accepted."""
        for entry in entries:
            self.apply(entry)

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case StudyOpened() | StudyAmended():
                self.study, self.inputs = entry.fact.study, entry.fact.inputs
                self._reopen(AMENDED, REMOVED)  # an amendment may be taken back
            case TrialPlanned(trial=trial):
                one = self.trials.pop(trial.id, None) or TrialState(trial=trial)  # known: an amendment was taken back
                one.trial, one.parked, one.num_failures, one.num_lost = trial, None, 0, 0
                self.trials[trial.id] = one
            case TrialStarted():
                one = self.trials[entry.fact.trial_id]
                one.lease, one.fence = entry.fact, entry.number
                one.claims.add(entry.fact.claim_id)
                self.hosts[one.trial.lineage] = host_of(entry.fact.worker)
                self.num_starts += 1
            case TrialResult():
                one = self.trials[entry.fact.trial_id]
                one.lease, one.result = None, entry.fact
                self.spent = add(self.spent, entry.fact.cost)
            case TrialFailed():
                one = self.trials[entry.fact.trial_id]
                one.lease = None
                one.num_failures += entry.fact.kind in COUNTED
                one.num_lost += entry.fact.kind == "lost"
                self.spent = add(self.spent, entry.fact.cost)
            case TrialParked():
                self.trials[entry.fact.trial_id].parked = entry.fact
            case Promoted():
                self.promoted.append(entry.fact)
            case Looked():
                self.looks.append(entry.fact)
            case PlannerAsked(reserved=reserved):
                self.spent = add(self.spent, self.asked)
                self.asked = reserved
            case PlannerAnswered(answer=answer, cost=cost):
                self.answer, self.asked = answer, Spending()
                self.idle_rounds += 1
                self.spent = add(self.spent, cost)
            case PlannerDecided():
                self.answer = None
                known = self.proposed.get(entry.fact.arm)
                if known is None or known.decision == "refused" or entry.fact.by != "rule":
                    self.proposed[entry.fact.arm] = entry.fact  # a name that is proposed again takes nothing back
                if entry.fact.decision != "refused":
                    self.idle_rounds = 0
            case StudyStopped():
                self.stopped = entry.fact
            case StudyResumed():
                self.stopped = None
                for one in self.trials.values():
                    if one.parked:
                        one.parked, one.num_failures, one.num_lost = None, 0, 0
            case _:
                pass

    def _reopen(self, *reasons: str) -> None:
        """Open trials again that were parked for one of these reasons."""
        for one in self.trials.values():
            if one.parked and one.parked.reason in reasons:
                one.parked = None

    @property
    def added_arms(self) -> dict[str, Arm]:
        """Arms of the planner that were accepted."""
        return {
            name: Arm(settings=fact.settings, files=fact.files)
            for name, fact in self.proposed.items()
            if fact.decision == "accepted"
        }

    @property
    def waiting(self) -> list[str]:
        """Arms of the planner that a person has to approve."""
        return [name for name, fact in self.proposed.items() if fact.decision == "waiting"]

    @property
    def newest(self) -> list[TrialState]:
        """Trials without those that an amendment has removed, or that were planned anew after it, for the same arm, seed and rung."""
        by_place = {
            (one.trial.purpose, one.trial.arm, one.trial.seed, one.trial.rung): one
            for one in self.trials.values()
            if not (one.parked and one.parked.reason == REMOVED)
        }
        return [*by_place.values()]

    @property
    def results(self) -> list[tuple[Trial, TrialResult]]:
        """Results that count. Those of trials that were planned anew are other settings' or other code's."""
        return [(one.trial, one.result) for one in self.newest if one.result is not None]

    @property
    def leased(self) -> list[TrialState]:
        return [one for one in self.trials.values() if one.lease is not None]

    @property
    def open(self) -> list[TrialState]:
        """Trials that wait for a worker."""
        return [one for one in self.trials.values() if one.lease is None and not one.is_settled]

    @property
    def reserved(self) -> Spending:
        """What the running trials and the planner may still spend."""
        total = self.asked
        for one in self.leased:
            assert one.lease is not None
            total = add(total, one.lease.reserved)
        return total


def add(one: Spending, other: Spending) -> Spending:
    return Spending(
        gpu_seconds=one.gpu_seconds + other.gpu_seconds, calls=one.calls + other.calls, money=one.money + other.money
    )


def largest_cost(study: Study) -> Spending:
    """Return what one start of a trial may spend."""
    plan = study.trial
    return Spending(gpu_seconds=(plan.max_seconds + KILL_S) * plan.gpus, calls=plan.max_calls, money=plan.max_money)


def list_caps(study: Study, spent: Spending, starts: int) -> list[tuple[str, float, float, float]]:
    """Return name, need of one trial, what is used, and cap, of each cap that is set."""
    need, budget = largest_cost(study), study.budget
    rows = [
        ("gpu_seconds", need.gpu_seconds, spent.gpu_seconds, budget.gpu_seconds),
        ("calls", need.calls, spent.calls, budget.calls),
        ("money", need.money, spent.money, budget.money),
        ("trials", 1, starts, budget.trials),
    ]
    return [(name, one, used, cap) for name, one, used, cap in rows if cap is not None]


def find_exceeded(state: StudyState, *, elapsed_s: float) -> str:
    """Return which cap might not hold if one more trial started, or "" if all hold."""
    assert state.study is not None
    budget, need = state.study.budget, largest_cost(state.study)
    total = add(add(state.spent, state.reserved), need)
    for name, cap, most in (
        ("gpu_seconds", budget.gpu_seconds, total.gpu_seconds),
        ("calls", budget.calls, total.calls),
        ("money", budget.money, total.money),
        ("wall_clock_s", budget.wall_clock_s, elapsed_s + state.study.trial.max_seconds + KILL_S),
        ("trials", budget.trials, state.num_starts + 1),
    ):
        if cap is not None and most > cap:
            return f"budget.{name}: another trial may bring it to {most:g}, and the cap is {cap:g}"
    return ""
