"""What the dashboard shows beyond episodes: steps, time, mix, evaluations, clients, engines, settings, logs. Only reads
files."""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq import live_settings, task_mix
from swarmq.collector import ledger
from swarmq.collector.decide.evals import RIGHT
from swarmq.config import Policy, RunFolder, SwarmJob
from swarmq.dashboard.overview import is_live
from swarmq.errors import ConfigError, SwarmqError
from swarmq.messages import Event
from swarmq.observe.clients import read_clients
from swarmq.observe.curves import find_changes
from swarmq.observe.followed_files import flatten_numbers
from swarmq.observe.run import Run, StepRow, read_steps
from swarmq.task_mix import Stretch

MAX_SPANS = 20_000
MAX_TASKS = 500
"""Maximum number of tasks in the matrix of evaluations; the tasks evaluated last are kept."""
LOG_BYTES = 2 * 1024 * 1024
"""Maximum bytes read from the end of a log file."""
LANES = {"waiting": "wait", "training": "train", "pushing": "push", "checkpointing": "checkpoint", "paused": "pause"}
"""Phase that a learner reports -> its label in the learner's lane."""


class UnknownLogError(SwarmqError):
    """The run has no log file of this name."""


def view_steps(run: Run, policy: str = "", series: Sequence[str] = ()) -> dict[str, Any]:
    """Return columns of the steps of a policy (the first one by default), and the names of all columns."""
    policy = policy or run.policies[0]
    run.check_policy(policy)
    events = list(run.events("step", "control"))
    rows = read_steps(events, policy)
    columns = [dict(flatten_numbers(row.values)) for row in rows]
    names = sorted({name for column in columns for name in column})
    return {
        "policy": policy,
        "steps": [row.step for row in rows],
        "at": [row.at for row in rows],
        "series": {name: [column.get(name) for column in columns] for name in (series or names) if name in set(names)},
        "names": names,
        "marks": list(_marks(events, rows)),
    }


def _marks(events: Iterable[Event], rows: Sequence[StepRow]) -> Iterator[dict[str, Any]]:
    for mark in find_changes(events):
        step = next((row.step for row in rows if row.at >= mark.at), None)
        if step is not None:
            kind = "client" if mark.text.startswith("client code") else "set"
            yield {"step": step, "at": mark.at, "kind": kind, "text": mark.text}


def view_time(run: Run) -> dict[str, Any]:
    """Return what each process did when, and samples of queues and engines."""
    lanes: dict[str, list[tuple[float, float, str]]] = {}
    phases: dict[str, tuple[float, str]] = {}
    for event in run.events("state", "step"):
        if event.name == "state" and "phase" in event.fields:
            began, what = phases.get(event.source, (event.at, ""))
            if what and event.at > began:
                lanes.setdefault(event.source, []).append((began, event.at, what))
            phases[event.source] = event.at, LANES.get(event.fields["phase"], "")
        elif event.name == "step" and event.source not in phases:
            lanes.setdefault(event.source, []).extend(_spans_of_step(event))
        if event.name == "step":
            for engine, seconds in event.fields.get("pauses", {}).items():
                if seconds:
                    lanes.setdefault(engine, []).append((event.at - seconds, event.at, "pause"))
    return {
        "lanes": [
            {"process": process, "spans": sorted(spans)[-MAX_SPANS:]} for process, spans in sorted(lanes.items())
        ],
        "samples": run.samples.read(),
    }


def _spans_of_step(event: Event) -> Iterator[tuple[float, float, str]]:
    """Yield (begin, end, name) of the parts of a step: waiting, training and push, which end at the event's time."""
    end = event.at
    for name, what in (("push_s", "push"), ("train_s", "train"), ("wait_s", "wait")):
        seconds = float(event.fields.get(name) or 0)
        if seconds > 0:
            yield end - seconds, end, what
            end -= seconds


def view_progress(run: Run) -> dict[str, Any]:
    """Return the progress of the index of episodes. Until it is done, counts would be wrong, so no view has any."""
    known = run.index.progress
    return {"episodes": known.episodes, "share": known.share, "is_done": known.is_done, "notes": known.notes}


def view_ledger(run: Run) -> dict[str, Any]:
    """Return the account of all episodes; without numbers until the index is done."""
    progress = view_progress(run)
    return {"index": progress} | (msgspec.structs.asdict(run.index.ledger()) if progress["is_done"] else {})


def view_clients(run: Run) -> dict[str, Any]:
    """Return the clients; none until the index is done."""
    progress = view_progress(run)
    return {"index": progress, "clients": read_clients(run.index) if progress["is_done"] else []}


def view_mix(run: Run) -> dict[str, Any]:
    """Return target and trained share of each kind, and the share of its groups that taught nothing, by step of the first policy."""
    progress = view_progress(run)
    rows = list(run.steps(run.policies[0]))
    control = ledger.read_control(run.folder.inbox)
    stretches = _stretches(run.job, control.changes if control else (), run.policies[0])
    kinds = list(
        dict.fromkeys(
            [*task_mix.kinds_of(stretches), *(k for row in rows for k in row.values.get("groups_by_kind", {}))]
        )
    )
    target: dict[str, list[float | None]] = {kind: [] for kind in kinds}
    trained: dict[str, list[float | None]] = {kind: [] for kind in kinds}
    for row in rows:
        wanted = task_mix.shares(stretches, row.step)
        groups = row.values.get("groups_by_kind", {})
        total = sum(groups.values())
        for kind in kinds:
            target[kind].append(wanted.get(kind, 0.0))
            trained[kind].append(groups.get(kind, 0) / total if total else None)
    flat = _flat(run, kinds, [row.at for row in rows]) if progress["is_done"] else {}
    steps = [row.step for row in rows]
    return {"index": progress, "kinds": kinds, "steps": steps, "target": target, "trained": trained, "flat": flat}


def _stretches(job: SwarmJob, changes: Iterable[Any], policy: str) -> list[Stretch]:
    """Return the mixes of a run in the order of their first steps."""
    found = [Stretch(from_step=0, mix=job.mix, schedule=job.mix_schedule)]
    for change in changes:
        if change.path == "mix":
            with contextlib.suppress(msgspec.ValidationError):
                mix = msgspec.convert(change.value, dict[str, float])
                found.append(Stretch(from_step=change.from_step.get(policy, 0), mix=mix))
    return sorted(found, key=lambda one: one.from_step)


def _flat(run: Run, kinds: Sequence[str], ends: Sequence[float]) -> dict[str, list[float | None]]:
    """Return, by kind, each step's share of groups with equal rewards among those that ended during the step; None if none ended."""
    counts: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for kind, ended, is_flat in run.index.query(
        "SELECT kind, max(coalesce(ended, began_at)), max(reason = 'equal_rewards') FROM episodes "
        "WHERE grp != '' AND fate IN ('trained', 'dropped') GROUP BY grp"
    ):
        if (step := bisect.bisect_left(ends, ended)) < len(ends):
            counts[kind, step][0] += is_flat
            counts[kind, step][1] += 1
    return {
        kind: [counts[kind, at][0] / counts[kind, at][1] if counts[kind, at][1] else None for at in range(len(ends))]
        for kind in kinds
    }


def view_evaluations(run: Run) -> dict[str, Any]:
    """Return the rounds of evaluation, and the share of successes of each task in each."""
    rounds: dict[float, dict[str, Any]] = {}
    for row in run.evaluations():
        one = rounds.setdefault(
            row.at,
            {
                "at": row.at,
                "version": row.version,
                "seconds": row.seconds,
                "missing": row.missing,
                "given_up": row.given_up,
                "kinds": {},
            },
        )
        one["kinds"][row.kind] = {
            "tasks": row.tasks,
            "episodes": row.episodes,
            "reward": row.reward,
            "pass": {str(k): _interval(value, row.tasks) for k, value in (row.values.get("pass") or {}).items()},
        }
    progress = view_progress(run)
    versions = {one["version"] for one in rounds.values()} if progress["is_done"] else set()
    return {"index": progress, "rounds": list(rounds.values()), "matrix": _matrix(run, versions)}


def _interval(value: Any, tasks: int) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {"value": None, "low": None, "high": None, "tasks": tasks, **value}
    return {"value": value, "low": value, "high": value, "tasks": tasks}


def _matrix(run: Run, versions: set[int]) -> dict[str, Any]:
    """Return the share of successes of each task under each evaluated version. The epoch of an evaluation slot
    (`task/repeat/epoch` in `Slot.id`) is the version; other evaluation episodes belong to no round."""
    cells: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for slot, task, success, reward in run.index.query(
        "SELECT slot, task, success, reward FROM episodes WHERE fate = 'eval' AND slot != '' ORDER BY began_at"
    ):
        version = _version_of_slot(slot)
        value = success if success is not None else None if reward is None else float(reward >= RIGHT)
        if version in versions and value is not None:
            cells[task][version].append(value)
    tasks = list(cells)[-MAX_TASKS:]
    shown = sorted(versions)
    shares = [[sum(of) / len(of) if (of := cells[task].get(version)) else None for version in shown] for task in tasks]
    return {"tasks": tasks, "versions": shown, "cells": shares}


def _version_of_slot(slot: str) -> int | None:
    last = slot.rpartition("/")[2]
    return int(last) if last.isdecimal() else None


def view_engines(run: Run, *, now: float | None = None) -> dict[str, Any]:
    """Return the engines, with their load while it is recorded, and every weight push."""
    board = read_board(run.folder)
    live = is_live(board, now=time.time() if now is None else now)
    load = board.get("engines") or {}
    urls: dict[str, str] = dict.fromkeys(load, "")
    for policy, engines in (_read_json(run.folder.endpoints).get("engines") or {}).items():
        urls |= dict.fromkeys(engines if isinstance(engines, list) else [], policy)
    for policy, one in run.job.policies.items():
        urls |= dict.fromkeys((url for url in one.engine.urls), policy)
    versions = {policy: one.get("step") for policy, one in (board.get("policies") or {}).items()}
    rows = [
        {
            "name": url.partition("://")[2] or url,
            "policy": policy,
            "url": url,
            "version": load.get(url, {}).get("version", versions.get(policy)),
            "state": (load.get(url, {}).get("state") or ("running" if url in load else "unknown"))
            if live
            else "not recorded",
            **{name: load.get(url, {}).get(name) if live else None for name in ("running", "waiting", "kv")},
        }
        for url, policy in urls.items()
    ]
    pushes = [
        {
            "step": row.step,
            "at": row.at,
            "policy": row.policy,
            "method": str(row.values.get("push_method") or ""),
            "push_s": row.values.get("push_s"),
            "pause_s": row.values.get("pause_s"),
        }
        for row in run.steps()
        if row.values.get("push_s") is not None
    ]
    return {"engines": rows, "is_live": live, "at": board.get("at"), "pushes": pushes}


def list_settings(job: SwarmJob) -> dict[str, Any]:
    """Return path -> value of every setting. Passwords in addresses, and parts of alert addresses that may be keys, are left
    out."""
    shown = dict(_leaves(msgspec.to_builtins(job)))
    shown["alerts.url"] = re.sub(r"^(https?://[^/?#]+).+", r"\1/…", shown["alerts.url"])
    shown["alerts.command"] = re.sub(r"^(\S+)\s.+", r"\1 …", shown["alerts.command"])
    return shown


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _hide_password(value)


def _hide_password(value: Any) -> Any:
    return re.sub(r"(?<=://)[^/@\s]+@", "…@", value) if isinstance(value, str) else value


def view_settings(run: Run) -> dict[str, Any]:
    """Return all settings beside their defaults, and the changes while the run was up."""
    first = next(iter(run.job.policies.values()))
    usual = list_settings(
        SwarmJob(run=run.job.run, policies=dict.fromkeys(run.job.policies, Policy(model=first.model)))
    )
    usual = {path: value for path, value in usual.items() if path != "run" and not path.endswith(".model")}
    control = ledger.read_control(run.folder.inbox)
    senders: dict[int, tuple[float, str]] = {}
    first_steps: dict[tuple[int, str], int] = {}
    for event in run.events("control"):
        if event.name == "control" and event.fields.get("state") == "accepted":
            senders.setdefault(event.fields.get("number", 0), (event.at, str(event.fields.get("sender", ""))))
        elif event.name == "control":
            for one in event.fields.get("changes", ()):
                first_steps.setdefault((event.fields.get("number", 0), one["path"]), one.get("from_step"))
    changes = control.changes if control else ()
    job = live_settings.apply_changes(run.job, changes)
    return {
        "settings": [
            {"path": path, "value": value, "default": usual.get(path), "is_set": usual.get(path) != value}
            for path, value in list_settings(job).items()
        ],
        "history": [
            {
                "number": change.number,
                "path": change.path,
                "before": change.before,
                "value": change.value,
                "from_step": min(change.from_step.values(), default=first_steps.get((change.number, change.path))),
                "at": senders.get(change.number, (None, ""))[0],
                "sender": senders.get(change.number, (None, ""))[1],
            }
            for change in changes
        ],
    }


def diff_settings(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return the settings in which runs differ."""
    known = [list_settings(run.job) for run in runs.values()]
    paths = dict.fromkeys(path for settings in known for path in settings)
    rows = [{"path": path, "values": [settings.get(path) for settings in known]} for path in paths]
    return {
        "runs": list(runs),
        "rows": [row for row in rows if any(value != row["values"][0] for value in row["values"])],
    }


def list_logs(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the log files. Symbolic links are left out: in a copied folder they may lead to any file of this machine."""
    with contextlib.suppress(OSError):
        files = sorted(path for path in folder.logs.iterdir() if path.is_file() and not path.is_symlink())
        return [{"name": path.name, "bytes": path.stat().st_size} for path in files]
    return []


def read_log(folder: RunFolder, name: str, *, lines: int) -> dict[str, Any]:
    """Return the end of a log file. Raises UnknownLogError if the run has no such file."""
    if name not in {one["name"] for one in list_logs(folder)}:
        raise UnknownLogError(f"{name!r}: the run has no such log file")
    try:
        with (folder.logs / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{folder.logs / name}: cannot be read ({error.strerror})") from error
    return {"name": name, "text": "\n".join(text.splitlines()[-lines:])}


def read_board(folder: RunFolder) -> dict[str, Any]:
    """Return the newest recorded state; empty if there is none."""
    return _read_json(folder.board)


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return {}
