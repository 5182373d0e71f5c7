"""How the leader answers a report: the facts that it appends, and what it tells the worker. Pure: no clock, no I/O."""

from __future__ import annotations

from typing import NamedTuple

from swarmq.studies.records import (
    AnyFact,
    Spending,
    StudyStopped,
    TrialFailed,
    TrialParked,
    TrialResult,
    TrialStarted,
)
from swarmq.studies.reports import Claim, LeaseVerdict, hash_terms
from swarmq.studies.state import COUNTED, StudyState, TrialState, find_exceeded, largest_cost

MAX_LOST = 50
"""Number of workers that a trial may lose before it is parked: it may be what kills them."""


class Decision(NamedTuple):
    """Facts to append, then the answer to the worker."""

    facts: list[AnyFact]
    verdict: LeaseVerdict | None = None


def on_claim(state: StudyState, claim: Claim, *, elapsed_s: float) -> Decision:
    """Decide whether a worker may run a trial."""
    study, one = state.study, state.trials.get(claim.trial_id)
    if study is None or one is None or one.is_settled:
        return Decision([], "drop")
    if one.lease is not None:
        if one.lease.claim_id == claim.claim_id:
            return Decision([], "run")
        # Another copy of the offer that is under lease is superfluous; the same one has come back because its holder died, or lost
        # its connection for a moment.
        return Decision([], "wait" if one.lease.copy_id == claim.copy_id else "drop")
    if state.stopped is not None:
        return Decision([], "stop")
    if claim.claim_id in one.claims:
        return Decision([], "drop")  # an old message, delivered again after the broker's crash: its lease has ended
    if claim.terms != hash_terms(study, one.trial.lineage):
        return Decision([], "differs")
    if why := find_exceeded(state, elapsed_s=elapsed_s):
        if state.leased:
            return Decision([], "wait")  # running trials may spend less than they have reserved
        return Decision([StudyStopped(kind="budget", reason=why)], "stop")
    started = TrialStarted(
        trial_id=claim.trial_id,
        worker=claim.worker,
        claim_id=claim.claim_id,
        copy_id=claim.copy_id,
        reserved=largest_cost(study),
    )
    return Decision([started], "run")


def on_loss(one: TrialState, loss: Spending) -> list[AnyFact]:
    """Return the facts of a lease whose holder has been silent for too long. `loss`: the most that it can have spent."""
    assert one.lease is not None
    facts: list[AnyFact] = [
        TrialFailed(
            trial_id=one.trial.id, fence=one.fence, kind="lost", reason=f"{one.lease.worker} fell silent", cost=loss
        )
    ]
    if one.num_lost + 1 >= MAX_LOST:
        facts.append(TrialParked(trial_id=one.trial.id, reason=f"{MAX_LOST} workers were lost with it"))
    return facts


def on_end(state: StudyState, ended: TrialResult | TrialFailed) -> Decision:
    """Decide about the end of a trial's start: it counts if the reporting worker still holds the lease."""
    one = state.trials.get(ended.trial_id)
    if state.study is None or one is None or one.lease is None or one.fence != ended.fence:
        return Decision([])
    if isinstance(ended, TrialResult) and (metric := state.study.metric.name) not in ended.metrics:
        ended = TrialFailed(
            trial_id=ended.trial_id,
            fence=ended.fence,
            kind="failure",
            reason=f"the trial has returned no {metric!r}, only {', '.join(ended.metrics)}",
            cost=ended.cost,
        )
    if isinstance(ended, TrialFailed) and ended.kind in COUNTED and one.num_failures + 1 >= state.study.max_failures:
        return Decision([ended, TrialParked(trial_id=ended.trial_id, reason=ended.reason, log=ended.log)])
    return Decision([ended])
