"""The present state of a run, folded from its events. Pure: no clock, no broker, no terminal."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from swarmq.live_settings import format_value
from swarmq.messages import Event

HISTORY = 512
RECENT_WARNINGS = 5
RATE_WINDOW_S = 20.0
PROXY_COUNTS = ("calls", "open_calls", "sampled_tokens", "errors", "continued", "repaired")


@dataclasses.dataclass
class ProcessState:
    """The newest state that a process has reported of itself."""

    fields: dict[str, Any]
    at: float


@dataclasses.dataclass
class BoardWarning:
    """A warning, or a control request, shown on the board."""

    source: str
    text: str
    at: float
    wording: str
    """Text without numbers and ids, equal for repetitions of the same warning."""
    times: int = 1
    command_id: str = ""
    """Id of the command that a control request answers; a command that is sent again is answered again."""


@dataclasses.dataclass
class Board:
    """State of a run, folded from its events by `fold`. Only the queue depths come from the broker instead."""

    run: str
    processes: dict[str, ProcessState] = dataclasses.field(default_factory=dict)
    steps: dict[str, deque[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Policy -> fields of the newest step events."""
    evals: deque[tuple[int, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=HISTORY))
    """(newest weight version at the time, reward) of finished evaluation episodes."""
    episodes: deque[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=lambda: deque(maxlen=HISTORY))
    stages: dict[str, str] = dataclasses.field(default_factory=dict)
    rounds: deque[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=lambda: deque(maxlen=HISTORY))
    """(Unix time, results) of evaluation rounds."""
    warnings: deque[BoardWarning] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT_WARNINGS))
    depths: dict[str, int] = dataclasses.field(default_factory=dict)
    """Queue -> number of waiting messages."""
    consumers: dict[str, int] = dataclasses.field(default_factory=dict)
    """Queue -> number of consumers."""
    depths_at: float = 0.0
    """Unix time of the newest queue depths; 0 before the first."""
    blocked: bool = False
    """Whether the broker blocks publishers."""
    _sampled: dict[str, deque[tuple[float, float]]] = dataclasses.field(default_factory=dict)

    def fold(self, event: Event) -> None:
        """Update the board with one event."""
        match event.name:
            case "state":
                self.processes[event.source] = ProcessState(event.fields, event.at)
                if "sampled_tokens" in event.fields:
                    window = self._sampled.setdefault(event.source, deque())
                    window.append((event.at, float(event.fields["sampled_tokens"])))
                    while window[0][0] < event.at - RATE_WINDOW_S:
                        window.popleft()
            case "step":
                policy = event.source.removeprefix("learner.")
                self.steps.setdefault(policy, deque(maxlen=HISTORY)).append(event.fields)
            case "eval":
                if (reward := event.fields.get("reward")) is not None:
                    self.evals.append((self.version, float(reward)))
            case "episode":
                self.episodes.append((event.at, event.fields))
            case "stage":
                self.stages[event.source] = str(event.fields.get("text", ""))
            case "warning":
                text = str(event.fields.get("text", event.fields))
                self._warn(BoardWarning(event.source, text, event.at, drop_figures(text)))
            case "evaluated":
                self.rounds.append((event.at, event.fields))
            case "control":
                line = describe_control(event.fields)
                command_id = str(event.fields.get("command_id", ""))
                self._warn(BoardWarning(event.source, line, event.at, line, command_id=command_id))
            case "weights":
                pass  # the next state event repeats it

    def _warn(self, new: BoardWarning) -> None:
        for old in self.warnings:
            if (old.source, old.wording) == (new.source, new.wording):
                self.warnings.remove(old)
                new.times = old.times + (not new.command_id or new.command_id != old.command_id)
                break
        self.warnings.append(new)

    @property
    def version(self) -> int:
        """Newest weight version of any policy; 0 before the first step."""
        return max((int(steps[-1].get("version", 0)) for steps in self.steps.values()), default=0)

    def held_out(self) -> tuple[int, list[float]] | None:
        """Return weight version and rewards of the newest evaluation, or of the one before as long as that has more episodes; None
        without any."""
        by_version: defaultdict[int, list[float]] = defaultdict(list)
        for version, reward in self.evals:
            by_version[version].append(reward)
        newest_two = [*by_version.items()][-2:]
        return max(newest_two, key=lambda one: (len(one[1]), one[0]), default=None)

    def tokens_per_s(self) -> float:
        """Return the sampled tokens per second over the last RATE_WINDOW_S, summed over all proxies."""
        return sum(
            (window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0])
            for window in self._sampled.values()
            if len(window) > 1 and window[-1][1] >= window[0][1]
        )

    def reported(self, source: str) -> dict[str, Any]:
        """Return the fields that a process reported last, or {} before its first event."""
        process = self.processes.get(source)
        return process.fields if process else {}

    def proxies(self) -> dict[str, Any]:
        """Return the counters of all proxies, summed; the share of drifted turns is over all of their turns."""
        every = [process.fields for source, process in self.processes.items() if source.startswith("proxy.")]
        sums = {name: sum(fields.get(name, 0) for fields in every) for name in PROXY_COUNTS}
        drifted = sum(fields.get("drift_rate", 0.0) * fields.get("continued", 0) for fields in every)
        branches = sum((Counter(fields.get("branches", {})) for fields in every), Counter[str]())
        return {**sums, "drift_rate": drifted / max(sums["continued"], 1), "branches": dict(branches)}


def board_to_json(board: Board, *, now: float) -> dict[str, Any]:
    """Return the content of the screen as plain data, for `--json`."""
    learners = {source.removeprefix("learner.") for source in board.processes if source.startswith("learner.")}
    return {
        "run": board.run,
        "at": now,
        "pace": board.reported("collector").get("pace", "running"),
        "blocked": board.blocked,
        "parts": {
            source: {"silent_s": round(now - process.at, 3), **process.fields}
            for source, process in sorted(board.processes.items())
        },
        "stages": board.stages,
        "policies": {name: _policy_data(board, name) for name in sorted({*learners, *board.steps})},
        "proxies": {**board.proxies(), "tokens_per_s": board.tokens_per_s()},
        "evaluation": board.rounds[-1][1] if board.rounds else None,
        "queues": board.depths,
        "warnings": [
            {"at": one.at, "source": one.source, "text": one.text, "times": one.times} for one in board.warnings
        ],
    }


def _policy_data(board: Board, policy: str) -> dict[str, Any]:
    newest = board.steps[policy][-1] if board.steps.get(policy) else {}
    state = board.reported(f"learner.{policy}")
    return {
        "phase": state.get("phase"),
        "step": newest.get("version", state.get("version", 0)),
        "reward": newest.get("reward"),
        "newest_step": newest,
    }


def drop_figures(text: str) -> str:
    """Remove numbers and episode ids from a text, keeping numbers within names."""
    return re.sub(r"[0-9a-f-]{32,}|(?<![\w./-])-?\d+(\.\d+)?", "#", text)


def describe_control(fields: dict[str, Any]) -> str:
    """Describe a control request or its effect in one line."""
    changes = ", ".join(
        f"{change['path']} = {format_value(change['value'])}"
        + (f" from step {change['from_step']}" if "from_step" in change else "")
        for change in fields.get("changes", [])
    )
    what = fields.get("text") or changes or fields.get("pace") or ""
    who = f" by {fields['sender']}" if fields.get("sender") else ""
    return f"{fields.get('action', '')} {fields.get('state', '')}{who}: {what}".strip(" :")


BLOCKS = "▁▂▃▄▅▆▇█"


def condense(values: Sequence[float], width: int) -> list[float]:
    """Average values into at most `width` means, the newest last. Values that are not finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    per_block = max(1, -(-len(finite) // width))
    chunks = (finite[max(0, end - per_block) : end] for end in range(len(finite), 0, -per_block))
    return [sum(chunk) / len(chunk) for chunk in chunks][::-1]


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """Draw one block character for each value, scaled from `low` to `high` (by default the smallest and largest value)."""
    floor = min(values, default=0.0) if low is None else low
    span = (max(values, default=0.0) if high is None else high) - floor
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * min(max((v - floor) / span, 0), 1))] if span > 0 else BLOCKS[0] for v in values)
