"""What a run looks like right now, folded from its events. Pure: no clock, no broker, no terminal."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from typing import Any

from swarmq.messages import Event

HISTORY = 512
RECENT_WARNINGS = 5
RATE_WINDOW_S = 20.0
PROXY_COUNTS = ("calls", "open_calls", "sampled_tokens", "errors", "continued", "repaired")


@dataclasses.dataclass
class Part:
    """One daemon as it last described itself."""

    fields: dict[str, Any]
    at: float


@dataclasses.dataclass
class Board:
    """Folded state of a run; `fold` is the only way it changes."""

    run: str
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    steps: dict[str, deque[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Policy -> the newest step events' fields."""
    evals: deque[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=lambda: deque(maxlen=HISTORY))
    """(Unix time, fields) of finished evaluation episodes."""
    episodes: deque[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=lambda: deque(maxlen=HISTORY))
    stages: dict[str, str] = dataclasses.field(default_factory=dict)
    rounds: deque[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=lambda: deque(maxlen=HISTORY))
    """(Unix time, figures) of evaluation rounds."""
    warnings: deque[tuple[float, str, str]] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT_WARNINGS))
    depths: dict[str, int] = dataclasses.field(default_factory=dict)
    """Queue -> messages that wait in it."""
    _sampled: dict[str, deque[tuple[float, float]]] = dataclasses.field(default_factory=dict)

    def fold(self, event: Event) -> None:
        """Take one event in."""
        match event.name:
            case "state":
                self.parts[event.source] = Part(event.fields, event.at)
                if "sampled_tokens" in event.fields:
                    window = self._sampled.setdefault(event.source, deque())
                    window.append((event.at, float(event.fields["sampled_tokens"])))
                    while window[0][0] < event.at - RATE_WINDOW_S:
                        window.popleft()
            case "step":
                policy = event.source.removeprefix("learner.")
                self.steps.setdefault(policy, deque(maxlen=HISTORY)).append(event.fields)
            case "eval":
                self.evals.append((event.at, event.fields))
            case "episode":
                self.episodes.append((event.at, event.fields))
            case "stage":
                self.stages[event.source] = str(event.fields.get("text", ""))
            case "warning":
                self.warnings.append((event.at, event.source, str(event.fields.get("text", event.fields))))
            case "evaluated":
                self.rounds.append((event.at, event.fields))
            case "control":
                self.warnings.append((event.at, event.source, control_line(event.fields)))
            case "weights":
                pass  # the engine's next state says the same

    def tokens_per_s(self) -> float:
        """Sampled tokens per second over the last RATE_WINDOW_S, all proxies together."""
        return sum(
            (window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0])
            for window in self._sampled.values()
            if len(window) > 1 and window[-1][1] >= window[0][1]
        )

    def part(self, source: str) -> dict[str, Any]:
        """The newest fields of a part; empty when it has not spoken yet."""
        part = self.parts.get(source)
        return part.fields if part else {}

    def proxies(self) -> dict[str, Any]:
        """What all proxies count, added up; the share of drifted turns is over all of their turns."""
        every = [part.fields for source, part in self.parts.items() if source.startswith("proxy.")]
        sums = {name: sum(fields.get(name, 0) for fields in every) for name in PROXY_COUNTS}
        drifted = sum(fields.get("drift_rate", 0.0) * fields.get("continued", 0) for fields in every)
        branches = sum((Counter(fields.get("branches", {})) for fields in every), Counter[str]())
        return {**sums, "drift_rate": drifted / max(sums["continued"], 1), "branches": dict(branches)}


def control_line(fields: dict[str, Any]) -> str:
    """What was asked of the run, or what came of it, in one line."""
    changes = ", ".join(
        f"{change['path']} = {change['value']}" + (f" from step {change['from_step']}" if "from_step" in change else "")
        for change in fields.get("changes", [])
    )
    what = fields.get("text") or changes or fields.get("pace") or ""
    who = f" by {fields['sender']}" if fields.get("sender") else ""
    return f"{fields.get('action', '')} {fields.get('state', '')}{who}: {what}".strip(" :")


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """The newest values as `width` or fewer block characters; several values share a block when there are more. Those that are not
    finite have none."""
    if not (values := [value for value in values if math.isfinite(value)]):
        return ""
    per_block = -(-len(values) // width)
    means = [
        sum(chunk) / len(chunk)
        for chunk in (values[max(0, end - per_block) : end] for end in range(len(values), 0, -per_block))
    ][::-1]
    floor = min(means) if low is None else low
    span = (max(means) if high is None else high) - floor
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * min(max((v - floor) / span, 0), 1))] if span > 0 else BLOCKS[0] for v in means)
