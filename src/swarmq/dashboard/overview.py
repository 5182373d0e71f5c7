"""The first page of a run: what is wrong, where its episodes are, and which process waits for which.

Reads the state that the run's recorder left (board.json) and the newest events, never a process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Event
from swarmq.observe.board import Board
from swarmq.observe.curves import read_events
from swarmq.observe.run import Run
from swarmq.runtime.wording import count_of

State = Literal["ok", "busy", "waiting", "down", "unknown"]

LIVE_S = 15.0
"""Age of board.json, in seconds, beyond which a run counts as not recorded any more."""
SILENT_S = 20.0
"""Seconds without an event of a process after which it counts as down."""
MAX_ALARMS = 20
RECENT_BYTES = 1024 * 1024
WAIT_SHARE = 0.3
"""Minimum share of a step spent waiting at which a learner counts as held up."""
LONG_INBOX = 200
"""Minimum number of messages, batches included, in the queue `in` at which the collector counts as too slow."""
RECENT_STEPS = 5


class Station(msgspec.Struct, frozen=True, kw_only=True):
    """One station of the pipeline."""

    id: str
    label: str
    depth: float | None = None
    rate_per_s: float | None = None
    oldest_s: float | None = None
    state: State = "unknown"
    detail: str = ""


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    text: str


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures from which the bottleneck is found; None if a figure is not known."""

    is_paused: bool = False
    has_ended: bool = False
    """Whether every policy has made its last step."""
    tickets: int | None = None
    """Number of unused tickets."""
    open_episodes: int | None = None
    inbox: int | None = None
    """Number of messages that the collector has not read."""
    inbox_in_per_s: float | None = None
    inbox_out_per_s: float | None = None
    ready_groups: int | None = None
    groups_per_batch: int = 1
    wait_s: float | None = None
    """Seconds that the learner waited for data in a recent step."""
    step_s: float | None = None
    requests_waiting: int | None = None
    """Number of requests that wait inside the engines."""
    kv: float | None = None
    """Largest share of an engine's KV cache in use."""
    open_calls: int | None = None
    is_broker_blocked: bool = False


def name_bottleneck(flow: Flow) -> Bottleneck | None:
    """Return who holds the run up, or None if nothing does or nothing is known."""
    if flow.is_paused or flow.has_ended:
        return None
    if flow.is_broker_blocked:
        return Bottleneck(node="in", text="RabbitMQ accepts no messages: it is low on memory or disk")
    grows = (flow.inbox_in_per_s or 0) > (flow.inbox_out_per_s or 0)
    if (flow.inbox or 0) >= LONG_INBOX and grows:
        return Bottleneck(
            node="collector", text=f"{flow.inbox} messages wait in `in`, and more come than the collector reads"
        )
    waits = flow.wait_s is not None and bool(flow.step_s) and flow.wait_s / (flow.step_s or 1) > WAIT_SHARE
    if not waits and (flow.ready_groups or 0) >= 2 * flow.groups_per_batch:
        return Bottleneck(
            node="learner",
            text=f"{count_of(flow.ready_groups or 0, 'group is', 'groups are')} ready, and a batch takes {flow.groups_per_batch}",
        )
    if flow.tickets and flow.open_episodes == 0:
        return Bottleneck(
            node="clients",
            text=f"{count_of(flow.tickets, 'ticket is', 'tickets are')} not taken: no client works at the tasks",
        )
    if not waits:
        return None
    share = f"the learner waits {100 * (flow.wait_s or 0) / (flow.step_s or 1):.0f} % of a step"
    if flow.requests_waiting or (flow.kv or 0) > 0.95:
        why = (
            f"{count_of(flow.requests_waiting, 'request queues', 'requests queue')} there"
            if flow.requests_waiting
            else "their KV cache is full"
        )
        return Bottleneck(node="engines", text=f"{share} for episodes that wait for the engines: {why}")
    if flow.tickets:
        return Bottleneck(
            node="clients",
            text=f"{share}, while {count_of(flow.tickets, 'ticket is', 'tickets are')} not taken: more clients would help",
        )
    if flow.open_episodes and flow.open_calls is not None and flow.open_calls < flow.open_episodes / 2:
        return Bottleneck(
            node="clients",
            text=f"{share}: of {count_of(flow.open_episodes, 'running episode')}, {flow.open_calls} now wait for the model; the agents or their "
            "environments are slow",
        )
    if flow.open_calls:
        return Bottleneck(
            node="engines", text=f"{share}, while {count_of(flow.open_calls, 'call is', 'calls are')} being answered"
        )
    return None


def view_overview(run: Run, board: Mapping[str, Any], job: SwarmJob, *, now: float | None = None) -> dict[str, Any]:
    """Return the overview. `board`: content of board.json, or {}. `job`: the settings with the changes made since the start."""
    now = time.time() if now is None else now
    events = list(_recent_events(run))
    steps: dict[str, deque[dict[str, Any]]] = {policy: deque(maxlen=RECENT_STEPS) for policy in job.trained}
    for event in events:
        policy = event.source.removeprefix("learner.")
        if event.name == "step" and policy in steps:
            steps[policy].append(event.fields)
    live = is_live(board, now=now)
    progress = {policy: _progress(job, policy, steps[policy], board) for policy in job.trained}
    has_ended = bool(progress) and all(p["max_steps"] and p["step"] >= p["max_steps"] for p in progress.values())
    flow = measure_flow(board, job, steps, has_ended=has_ended)
    known = run.index.progress
    times = [float(board["at"])] if "at" in board else [event.at for event in events[-1:]]
    return {
        "at": next(iter(times), None),
        "is_live": live,
        "alarms": find_alarms(events, board, now=now, is_live=live),
        "nodes": describe_nodes(board, job, steps, flow, now=now, is_live=live),
        "bottleneck": name_bottleneck(flow) if live else None,
        "ledger": run.index.ledger() if known.is_done else None,
        "progress": progress,
        "index": {"episodes": known.episodes, "share": known.share, "is_done": known.is_done, "notes": known.notes},
    }


def is_live(board: Mapping[str, Any], *, now: float) -> bool:
    """Return whether the state of the run was recorded just now, so that it is the present one."""
    return bool(board.get("recorder", {}).get("is_recording")) and now - float(board.get("at", 0)) < LIVE_S


def _recent_events(run: Run) -> Iterable[Event]:
    try:
        yield from read_events(run.folder.events, last_bytes=RECENT_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{run.folder.events}: cannot be read ({error.strerror})") from error


def _progress(
    job: SwarmJob, policy: str, steps: Iterable[Mapping[str, Any]], board: Mapping[str, Any]
) -> dict[str, Any]:
    newest: Mapping[str, Any] = next(reversed(list(steps)), {})
    recorded = (board.get("policies") or {}).get(policy) or {}
    step = newest.get("version", recorded.get("step") or 0)
    return {
        "step": int(step),
        "max_steps": job.policies[policy].train.max_steps or None,
        "reward": newest.get("reward", recorded.get("reward")),
        "step_s": newest.get("step_s"),
    }


def find_alarms(
    events: Iterable[Event], board: Mapping[str, Any], *, now: float, is_live: bool
) -> list[dict[str, Any]]:
    """Return alarms and warnings, the newest first. Equal warnings are counted instead of repeated. Stalls of a run that was
    stopped in order are left out, because it waits for nothing now."""
    was_stopped = board.get("recorder", {}).get("is_recording") is False
    folded = Board(run="", warnings=deque(maxlen=MAX_ALARMS))
    for event in events:
        if event.name == "warning" and not (was_stopped and event.fields.get("kind") == "stall"):
            folded.fold(event)
    alarms = [
        {"at": one.at, "source": one.source, "text": one.text, "times": one.times} for one in reversed(folded.warnings)
    ]
    if is_live:
        broker = (board.get("broker") or {}).get("state")
        texts = {
            "away": "RabbitMQ cannot be reached",
            "blocked": "RabbitMQ accepts no messages: it is low on memory or disk",
        }
        if broker in texts:
            alarms.insert(0, {"at": now, "source": "broker", "text": texts[broker], "times": 1})
        for url, engine in (board.get("engines") or {}).items():
            if engine.get("state") == "down":
                alarms.insert(0, {"at": now, "source": url, "text": "the engine does not answer", "times": 1})
    return alarms


def measure_flow(
    board: Mapping[str, Any],
    job: SwarmJob,
    steps: Mapping[str, Iterable[Mapping[str, Any]]],
    *,
    has_ended: bool,
) -> Flow:
    """Return the figures of the pipeline."""
    queues: Mapping[str, int] = board.get("queues") or {}
    details: Mapping[str, Any] = board.get("queue_details") or {}
    parts: Mapping[str, Any] = board.get("parts") or {}
    collector = parts.get("collector") or {}
    engines = (board.get("engines") or {}).values()
    recent = [step for policy in steps.values() for step in policy]
    inboxes = _inboxes(job)
    return Flow(
        is_paused=collector.get("pace", "running") != "running",
        has_ended=has_ended,
        tickets=sum(collector["tickets_out"].values()) if "tickets_out" in collector else None,
        open_episodes=collector.get("open"),
        inbox=_sum(queues.get(name) for name in inboxes),
        inbox_in_per_s=_sum((details.get(name) or {}).get("in_per_s") for name in inboxes),
        inbox_out_per_s=_sum((details.get(name) or {}).get("out_per_s") for name in inboxes),
        ready_groups=sum(collector["groups_ready"].values()) if "groups_ready" in collector else None,
        groups_per_batch=job.groups.groups_per_batch,
        wait_s=_mean(step.get("wait_s") for step in recent),
        step_s=_mean(step.get("step_s") for step in recent),
        requests_waiting=sum(int(one.get("waiting") or 0) for one in engines) if engines else None,
        kv=max((float(one.get("kv") or 0) for one in engines), default=None),
        open_calls=_sum(part.get("open_calls") for source, part in parts.items() if source.startswith("proxy.")),
        is_broker_blocked=bool(board.get("blocked")),
    )


def describe_nodes(
    board: Mapping[str, Any],
    job: SwarmJob,
    steps: Mapping[str, Iterable[Mapping[str, Any]]],
    flow: Flow,
    *,
    now: float,
    is_live: bool,
) -> list[Station]:
    """Return the stations of the pipeline in the order in which an episode passes them."""
    parts: Mapping[str, Any] = board.get("parts") or {}
    collector = parts.get("collector") or {}
    queues, details = board.get("queues") or {}, board.get("queue_details") or {}
    proxies = {source: part for source, part in parts.items() if source.startswith("proxy.")}
    learners = {source: part for source, part in parts.items() if source.startswith("learner.")}
    training = [part for part in learners.values() if part.get("phase") != "ended"]
    engines = board.get("engines") or {}
    inboxes = _inboxes(job)
    ticket_queues = [topology.tickets(job.run, kind) for kind in job.task_kinds]
    ready_queues = [topology.ready(job.run, policy) for policy in job.trained]
    phases = sorted({str(part.get("phase")) for part in learners.values() if part.get("phase")})
    step_s = _mean(step.get("step_s") for policy in steps.values() for step in policy)
    broker: State = "down" if (board.get("broker") or {}).get("state") == "away" else "ok"

    def process(*found: Mapping[str, Any], busy: bool = False) -> State:
        """Return the state of a station from what its processes reported last (`found`). `busy`: whether they have work to do."""
        if not is_live:
            return "unknown" if not board else "down"
        if not found or any(now - float(part.get("at", now)) > SILENT_S for part in found):
            return "down"
        return "busy" if busy else "ok"

    def queue(names: list[str], *, used: bool = True) -> State:
        if not is_live:
            return "unknown"
        return (
            broker if broker == "down" else "waiting" if used and not _sum(queues.get(name) for name in names) else "ok"
        )

    engine_states = {str(one.get("state")) for one in engines.values()}
    is_learner_waiting = bool(phases) and set(phases) <= {"waiting", "paused", "ended"}
    nodes = [
        Station(
            id="clients",
            label="clients",
            depth=flow.open_episodes,
            state="unknown" if not is_live else "ok" if flow.open_episodes else "waiting",
            detail=count_of(collector.get("begun", 0), "episode") + " begun" if collector else "",
        ),
        Station(
            id="tickets",
            label="tickets",
            depth=flow.tickets,
            oldest_s=_oldest(details, ticket_queues),
            rate_per_s=_sum((details.get(name) or {}).get("out_per_s") for name in ticket_queues),
            state=queue(ticket_queues),
            detail=", ".join(f"{kind} {n}" for kind, n in (collector.get("tickets_out") or {}).items()),
        ),
        Station(
            id="proxies",
            label="proxies",
            depth=flow.open_calls,
            rate_per_s=(board.get("proxies") or {}).get("tokens_per_s") if is_live else None,
            state=process(*proxies.values(), busy=bool(flow.open_calls)),
            detail=f"{count_of(len(proxies), 'proxy', 'proxies')}, rate in tokens" if proxies else "",
        ),
        Station(
            id="in",
            label="in",
            depth=flow.inbox,
            oldest_s=_oldest(details, inboxes),
            rate_per_s=flow.inbox_out_per_s,
            state=queue(inboxes, used=False),
        ),
        Station(
            id="collector",
            label="collector",
            depth=collector.get("waiting"),
            state=process(*([collector] if collector else []), busy=bool(flow.inbox)),
            detail=_describe_collector(collector),
        ),
        Station(
            id="ready",
            label="ready",
            depth=_sum(queues.get(name) for name in ready_queues),
            oldest_s=_oldest(details, ready_queues),
            rate_per_s=_sum((details.get(name) or {}).get("out_per_s") for name in ready_queues),
            state=queue(ready_queues),
            detail=f"{count_of(flow.ready_groups or 0, 'group')}, a batch takes {flow.groups_per_batch}"
            if collector
            else "",
        ),
        Station(
            id="learner",
            label="learner" if len(job.trained) == 1 else "learners",
            depth=collector.get("in_learners"),
            rate_per_s=1 / step_s if step_s else None,
            state=process(*training, busy=True) if training or not (is_live and learners) else "ok",
            detail=", ".join(phases),
        ),
        Station(
            id="engines",
            label="engines",
            depth=_sum(value for one in engines.values() for value in (one.get("running"), one.get("waiting"))),
            state="unknown"
            if not is_live or not engines
            else "down"
            if "down" in engine_states
            else "busy"
            if any(one.get("running") for one in engines.values())
            else "ok",
            detail=f"KV cache {100 * flow.kv:.0f} %" if flow.kv is not None else "",
        ),
    ]
    return [
        msgspec.structs.replace(node, state="waiting")
        if node.id == "learner" and node.state == "busy" and is_learner_waiting
        else node
        for node in nodes
    ]


def _describe_collector(collector: Mapping[str, Any]) -> str:
    if not collector:
        return ""
    pace = collector.get("pace", "running")
    groups = count_of(collector.get("groups_open", 0), "group") + " open"
    return groups if pace == "running" else f"{pace}, {groups}"


def _oldest(details: Mapping[str, Any], names: Iterable[str]) -> float | None:
    ages = [(details.get(name) or {}).get("oldest_s") for name in names]
    return max((age for age in ages if age is not None), default=None)


def _inboxes(job: SwarmJob) -> list[str]:
    """Return the queues from which the collector takes messages of episodes."""
    return [topology.inbox(job.run), *topology.list_turns(job.run, job.collector.turn_queues)]


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of the known values, or None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None
