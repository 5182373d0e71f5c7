"""Studies of tests: small study files, and ledgers that are written by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from swarmq.studies.identity import hash_json
from swarmq.studies.records import AnyFact, Entry, Spending, StudyOpened, Trial, TrialPlanned, TrialResult, TrialStarted
from swarmq.studies.state import StudyState, largest_cost
from swarmq.studies.study import Arm, Study

FIRST: dict[str, Any] = {
    "name": "first",
    "question": "Is b more than a?",
    "metric": {"name": "score"},
    "smallest_effect": 0.5,
    "seeds": [0, 1, 2],
    "trial": {"function": "work:trial", "max_seconds": 9},
    "arms": {"a": {"settings": {"arm": 1}}, "b": {"settings": {"arm": 2}}},
    "budget": {"gpu_seconds": 1000},
}


def study_of(**changes: Any) -> Study:
    """Return a study of two arms and three seeds; `changes` replace whole tables of its file."""
    return msgspec.convert(FIRST | changes, Study)


def make_trial(study: Study):
    """Return a maker of trials whose results depend on nothing but settings, seed and steps."""

    def make(arm: str, plan: Arm, seed: int, *, rung: int = 0, purpose: str = "compare") -> Trial:
        steps = study.design.rungs[rung] if study.design.rungs else 0
        lineage = hash_json([plan.settings, plan.files, seed])
        return Trial(
            id=hash_json([lineage, steps]),
            arm=arm,
            seed=seed,
            settings=plan.settings,
            steps=steps,
            rung=rung,
            lineage=lineage,
            purpose=purpose,
        )

    return make


class Story:
    """A ledger in memory that grows by facts."""

    def __init__(self, study: Study) -> None:
        self.study, self.entries = study, list[Entry]()
        self.state = StudyState()
        self.add(StudyOpened(study=study, digest="d", inputs="i"))

    def add(self, *facts: AnyFact) -> None:
        for fact in facts:
            entry = Entry(number=len(self.entries) + 1, at=0.0, elapsed_s=0.0, previous="", fact=fact)
            self.entries.append(entry)
            self.state.apply(entry)

    def plan(self, arm: str = "a", seed: int = 0) -> Trial:
        trial = make_trial(self.study)(arm, self.study.arms[arm], seed)
        self.add(TrialPlanned(trial=trial))
        return trial

    def start(self, trial: Trial, claim: str = "c", copy: str = "o") -> int:
        """Lease the trial and return the fencing token."""
        reserved = largest_cost(self.study)
        self.add(TrialStarted(trial_id=trial.id, worker="w:1", claim_id=claim, copy_id=copy, reserved=reserved))
        return len(self.entries)

    def finish(self, trial: Trial, value: float, *, seconds: float = 1.0) -> None:
        fence = self.start(trial)
        cost = Spending(gpu_seconds=seconds)
        self.add(TrialResult(trial_id=trial.id, fence=fence, metrics={"score": value}, cost=cost))
