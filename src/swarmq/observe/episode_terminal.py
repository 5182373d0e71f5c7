"""Lists of episodes, and one episode that was not trained, for a terminal: conversation and tokens, with the reason first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swarmq.observe.episodes import EpisodeDetail, TokenPage, TurnView
from swarmq.observe.index import EpisodeRow
from swarmq.observe.inspect.terminal import ID_CHARS, columns, portions, style_by_surprise
from swarmq.observe.reasons import explain
from swarmq.runtime.terminal import visible
from swarmq.runtime.wording import count_of

MAX_REASONS = 5
"""Maximum number of reasons that are explained below a list."""
DETAIL_CHARS = 100
"""Maximum number of characters of a client's words in a list."""
STATE_WORDS = {"published": "in learners"}
"""Words for states, the dashboard's, where the state's name says too little."""
ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def draw_list(
    rows: Sequence[EpisodeRow], total: int, reasons: Mapping[str, int], details: Mapping[str, str]
) -> Iterator[RenderableType]:
    """Yield a row per episode, and below them how many there are and what their reasons mean. `reasons`: reason -> number of
    episodes; `details`: episode -> its client's words, of which the last line is shown: the error, if they are a traceback."""
    headings = ("began", "reward", "turns", "tokens", "step", "episode", "kind", "state", "reason", "detail")
    cells = [
        (
            datetime.fromtimestamp(row.began_at).astimezone().strftime("%H:%M:%S") if row.began_at else "",
            "" if row.reward is None else f"{row.reward:.3f}",
            str(row.turns),
            str(row.sampled_tokens or ""),
            "" if row.step is None else str(row.step),
            row.id[-ID_CHARS:],
            row.kind,
            STATE_WORDS.get(row.state, row.state),
            row.reason,
            _last_line(details.get(row.id, "")),
        )
        for row in rows
    ]
    shown = len(headings) - (not any(detail for *_, detail in cells))
    yield from portions(columns(headings[:shown], [line[:shown] for line in cells], words=shown - 5))
    yield Text(
        f"\n{count_of(total, 'episode')}"
        + (f", the newest {len(rows)} of them shown (--limit)" if len(rows) < total else "")
        + "\n"
    )
    known = [(reason, number) for reason, number in reasons.items() if reason not in {"", "finished"}]
    for reason, number in known[:MAX_REASONS]:
        yield Text.assemble((visible(reason), "bold"), f" {number}: {visible(explain(reason))}\n")
    if len(known) > MAX_REASONS:
        yield Text(f"and {len(known) - MAX_REASONS} other reasons\n")
    if rows:
        yield Text(f"`swarmq inspect RUN {rows[0].id[-ID_CHARS:]}` shows the first of them\n", "dim")


def draw_detail(detail: EpisodeDetail, timelines: Iterable[TokenPage]) -> Iterator[RenderableType]:
    """Yield what became of an episode and why, its conversation, and a row per token of each timeline."""
    yield from draw_fate(detail)
    for turn in detail.turns:
        yield from portions(_turn_pieces(turn))
    headings = ("pos", "id", "cause", "logprob", "version", "turn", "token")
    for page in timelines:
        sampled = sum(cause != "given" for cause in page.cause)
        yield Text(
            f"\ntimeline {page.timeline}: policy {page.policy}, {count_of(page.total, 'token')}, {sampled} sampled\n",
            "bold",
        )
        cells = [
            (
                str(position),
                str(page.id[at]),
                page.cause[at],
                _figure(page.logprob[at]),
                _figure(page.version[at]),
                _figure(page.turn[at]),
                repr(page.text[at])[1:-1],
            )
            for at, position in enumerate(range(*page.positions))
        ]
        styles = ["dim" if value is None else style_by_surprise(value) for value in page.logprob]
        yield from portions(columns(headings, cells, styles))
        for note in page.notes:
            yield Text(f"note: {visible(note)}\n", "dim")


def draw_fate(detail: EpisodeDetail) -> Iterator[RenderableType]:
    """Yield the head of an episode: its state, why it was or was not trained, and what its client reported."""
    row = detail.row
    state = STATE_WORDS.get(row.state, row.state) + (f": {row.reason}" if row.reason else "")
    yield Text.assemble((visible(row.id), "bold"), f"  {visible(state)}\n", (f"{visible(detail.why)}\n", "yellow"))
    facts = {
        "detail": detail.detail,
        "slot": row.slot,
        "kind": row.kind,
        "client": row.client,
        "code version": row.code_version,
        "rewards": _pairs(detail.rewards),
        "metrics": _pairs(detail.metrics),
        "metadata": ", ".join(f"{name}: {value}" for name, value in detail.metadata.items()),
        "note": "; ".join(detail.notes),
    }
    for name, words in facts.items():
        if words:
            yield Text(f"{name}: {visible(words)}\n")


def _turn_pieces(turn: TurnView) -> Iterator[tuple[str, str]]:
    about = [
        f"policy {turn.policy}",
        *([f"agent {turn.agent}"] if turn.agent else []),
        f"{count_of(turn.prompt_tokens, 'prompt token')}, {turn.sampled_tokens} sampled, {turn.finish_reason}",
        *([f"branch: {turn.branch}"] if turn.branch else []),
        *([] if turn.received else ["not received by the agent"]),
    ]
    yield f"\nturn {turn.number}: {'; '.join(about)}\n", "bold"
    for message in turn.messages:
        role = str(message.get("role", "unknown"))
        yield f"{role}: ", ROLE_STYLES.get(role, "magenta")
        yield f"{_content(message)}\n", ""


def _content(message: Mapping[str, Any]) -> str:
    """Return the content of a message, with everything beside it as JSON."""
    content = message.get("content")
    others = {name: value for name, value in message.items() if name not in {"role", "content"} and value}
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    return "\n".join(filter(None, [text, json.dumps(others, ensure_ascii=False) if others else ""]))


def _last_line(words: str) -> str:
    last = next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "")
    return last if len(last) <= DETAIL_CHARS else f"{last[:DETAIL_CHARS]}..."


def _pairs(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _figure(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"
