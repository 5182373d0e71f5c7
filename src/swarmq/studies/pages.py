"""Studies for the dashboard: which there are, and what one of them shows. Reads ledgers, and the run folders of trainings that run
on this host, so it slows no study."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq.dashboard.shelf import UnknownRunError
from swarmq.errors import StudyError
from swarmq.studies.ledger import StudyFolder, read_ledger
from swarmq.studies.records import Entry
from swarmq.studies.state import StudyState, TrialState, add
from swarmq.studies.training import read_curves
from swarmq.studies.trial import has_started

PATTERNS = ("ledger.jsonl", "*/ledger.jsonl", "studies/*/ledger.jsonl")
"""Places of ledgers below a folder that a dashboard was given."""


class StudyRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    folder: str
    question: str = ""
    state: str = ""
    """`running`, or why it stopped: `complete`, `budget`, `rule`, `asked`; `unreadable`."""
    error: str = ""
    results: int = 0
    trials: int = 0
    at: float | None = None
    """Unix time of the last entry."""


class StudyShelf:
    """The studies below some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def rows(self) -> list[StudyRow]:
        """Return all studies, the newest first."""
        return sorted(map(_read_row, self._find()), key=lambda row: -(row.at or 0))

    def show(self, id: str) -> dict[str, Any]:  # noqa: A002 - what addresses call it
        """Return a study: arms, comparisons, curves, trials, budget. Raises UnknownRunError for an id without a study."""
        path = next((path for path in self._find() if _id(path) == id), None)
        if path is None:
            raise UnknownRunError(f"no study has the id {id!r}")
        entries = read_ledger(path)
        shown = _view(entries) | {"id": id, "folder": str(path.parent)}
        _add_running(shown["curves"], StudyState(entries), StudyFolder(path, path.parent.name, path=path.parent))
        return shown

    def _find(self) -> list[Path]:
        found = {path.absolute() for folder in self._folders for pattern in PATTERNS for path in folder.glob(pattern)}
        return sorted(found)


def _id(path: Path) -> str:
    """Return the id of a ledger: its study's name and, since names may be the same, what tells its folder apart."""
    return f"{path.parent.name}-{zlib.crc32(str(path).encode()):08x}"


def _read_row(path: Path) -> StudyRow:
    row: dict[str, Any] = {"id": _id(path), "folder": str(path.parent), "name": path.parent.name}
    try:
        entries = read_ledger(path)
        state = StudyState(entries)
    except (StudyError, OSError) as error:
        return StudyRow(**row, state="unreadable", error=str(error))
    if state.study is None:
        return StudyRow(**row, state="unreadable", error="the ledger is empty")
    return StudyRow(
        **row | {"name": state.study.name},
        question=state.study.question,
        state=state.stopped.kind if state.stopped else "running",
        results=len(state.results),
        trials=len(state.newest),
        at=entries[-1].at,
    )


def _view(entries: Sequence[Entry]) -> dict[str, Any]:
    state = StudyState(entries)
    study = state.study
    if study is None:
        raise StudyError("the ledger is empty")
    used, budget = add(state.spent, state.reserved), study.budget
    newest = {one.trial.id for one in state.newest}
    caps = [
        ("GPU seconds", state.spent.gpu_seconds, used.gpu_seconds, budget.gpu_seconds),
        ("calls", state.spent.calls, used.calls, budget.calls),
        ("money", state.spent.money, used.money, budget.money),
        ("seconds with a leader", entries[-1].elapsed_s, entries[-1].elapsed_s, budget.wall_clock_s),
        ("starts", state.num_starts, state.num_starts, budget.trials),
    ]
    return {
        "name": study.name,
        "question": study.question,
        "metric": f"{study.metric.name} ({study.metric.direction})",
        "smallest_effect": study.smallest_effect,
        "state": state.stopped.kind if state.stopped else "running",
        "reason": state.stopped.reason if state.stopped else "",
        "at": entries[-1].at,
        "level": 1 - study.stopping.alpha,
        "has_rungs": bool(study.design.rungs),
        "trials": [_trial(one, study.metric.name, is_newest=one.trial.id in newest) for one in state.trials.values()],
        "budget": [
            {"name": name, "spent": spent, "reserved": total - spent, "cap": cap}
            for name, spent, total, cap in caps
            if total or cap is not None
        ],
        "proposals": [
            {"arm": name, "decision": fact.decision, "by": fact.by, "reason": fact.reason}
            for name, fact in state.proposed.items()
        ],
        **_analyse(entries),
    }


def _trial(one: TrialState, metric: str, *, is_newest: bool) -> dict[str, Any]:
    return {
        "id": one.trial.id,
        "arm": one.trial.arm,
        "seed": one.trial.seed,
        "rung": one.trial.rung,
        "is_noise": one.trial.purpose == "noise",
        "state": one.status,
        "is_newest": is_newest,
        "value": one.result.metrics.get(metric) if one.result else None,
        "gpu_seconds": one.result.cost.gpu_seconds if one.result else None,
        "failures": one.num_failures + one.num_lost,
        "worker": one.lease.worker if one.lease else "",
        "reason": one.parked.reason if one.parked else "",
    }


def _analyse(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return comparisons and curves as in the report, or nothing without the extra `studies`."""
    try:
        from swarmq.studies.report.blocks import Curves, Figure  # noqa: PLC0415 - an extra, and slow
        from swarmq.studies.report.compose import compose, read_comparisons  # noqa: PLC0415
    except ModuleNotFoundError:
        return {"comparisons": None, "curves": []}
    charts = [block.chart for block in compose(entries) if isinstance(block, Figure)]
    comparisons = [
        {
            "arm": found.arm,
            "seeds": len(found.seeds),
            "mean": found.mean,
            "low": found.interval.low,
            "high": found.interval.high,
            "p": found.p_holm,
            "verdict": found.verdict,
        }
        for found in read_comparisons(entries)
    ]
    curves = [msgspec.to_builtins(chart) for chart in charts if isinstance(chart, Curves)]
    return {"comparisons": [{k: _finite(v) for k, v in one.items()} for one in comparisons], "curves": curves}


def _add_running(curves: list[dict[str, Any]], state: StudyState, folder: StudyFolder) -> None:
    """Add the curves so far of trainings that run on this host, each by itself."""
    charts = {chart["y"]: chart for chart in curves}
    for one in state.leased:
        here = folder.trial(one.trial.lineage)
        if not (one.lease and has_started(here, one.lease.claim_id)):
            continue  # it runs on another host, and what is here is of an earlier start
        for metric, values in read_curves(here).items():
            if metric not in charts:
                charts[metric] = {"x": "step", "y": metric, "lines": []}
                curves.append(charts[metric])
            line = {"label": f"{one.trial} (running)", "values": values, "low": (), "high": ()}
            charts[metric]["lines"].append(line)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and abs(value) == float("inf") else value
