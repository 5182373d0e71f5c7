"""Batches and episodes of a batch log for a terminal, in fixed columns within 80 characters, nothing cut.

Lines are produced in portions, so that an episode of many thousand tokens appears within a second. `print_parts` prints them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain, groupby, islice, repeat

import msgspec
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.observe.inspect.read import (
    BatchRow,
    EpisodeView,
    StepEpisode,
    TokenRow,
    describe_narrow_rewards,
    max_contribution,
)
from swarmq.runtime.terminal import visible
from swarmq.runtime.wording import count_of
from swarmq.token_drift import Drift

FAINT_LOGPROB, STRONG_LOGPROB = -0.1, -2.0
"""Log-probabilities above which a sampled token was nearly certain, and below which it was surprising."""
HIGHLIGHT_SHARE = 0.5
"""Minimum contribution of a token that is highlighted, as a share of the largest contribution in the episode."""
ID_CHARS = 8
"""Number of characters to show of an id: the last ones, which are random and identify the episode."""
PORTION = 256
"""Number of text pieces that are printed at once."""
MARKS = {
    LossEffect.WHOLE: "1",
    LossEffect.MASKED: "masked",
    LossEffect.CLIPPED: "clipped",
    LossEffect.TRUNCATED: "trunc",
}

Styled = tuple[str, str]
"""Text and its style."""


def draw_batches(batches: Iterable[BatchRow]) -> Iterator[RenderableType]:
    """Yield a row per batch with the episodes dropped before it, and below the reasons for drops and the drift over all
    batches."""
    log = list(batches)
    rows, left = _steps_of(log)
    headings = ("step", "episodes", "groups", "dropped", "reward trained", "drift", "logged", "episode")
    cells = [
        (
            str(row.step),
            str(row.episodes),
            str(row.groups),
            str(sum(row.dropped.values())),
            "" if row.reward_trained is None else f"{row.reward_trained:.3f}",
            f"{row.drift.rate:.1%}" if row.drift.continued else "",
            datetime.fromtimestamp(row.at).astimezone().strftime("%H:%M:%S"),
            row.first_episode[-ID_CHARS:],
        )
        for row in rows
    ]
    yield from portions(columns(headings, cells))
    last = rows[-1] if rows else None
    dropped = sum((Counter(row.dropped) for row in log), Counter[str]())
    since = f"; {left.total()} of them {f'since step {last.step}' if last else 'before the first step'}" if left else ""
    yield Text(f"\ndropped: {_counts(dropped) or 'none'}{since}\nturns: {sum((row.drift for row in log), Drift())}\n")
    if last:
        yield Text(
            f"--step {last.step} lists the episodes of a step, {last.first_episode[-ID_CHARS:]} shows one\n", "dim"
        )


def _steps_of(log: Iterable[BatchRow]) -> tuple[list[BatchRow], Counter[str]]:
    """Return the rows of batches, each with the drops recorded before it, and the drops since the last batch."""
    rows, before = list[BatchRow](), Counter[str]()
    for row in log:
        before += Counter(row.dropped)
        if row.step is not None:
            rows.append(msgspec.structs.replace(row, dropped=dict(before)))
            before = Counter()
    return rows, before


def draw_step(rows: Sequence[StepEpisode]) -> Iterator[RenderableType]:
    """Yield a row per trained episode, then the dropped episodes."""
    headings = ("reward", "turns", "orphans", "sampled", "episode", "group")
    trained = [row for row in rows if not row.dropped]
    cells = [
        (f"{row.reward:.3f}", str(row.turns), str(row.orphan_turns), str(row.sampled_tokens), row.episode_id, row.group)
        for row in trained
    ]
    yield from portions(columns(headings, cells, words=2))
    if dropped := [row for row in rows if row.dropped]:
        yield Text(f"\ndropped: {_counts(Counter(row.dropped for row in dropped))}\n")
        yield from portions(columns(("reason", "episode"), [(row.dropped, row.episode_id) for row in dropped], words=2))


def draw_episode(view: EpisodeView) -> Iterator[RenderableType]:
    """Yield head lines, then for each timeline its text coloured by contribution, and a row per token."""
    yield Text.assemble(
        (visible(view.episode_id), "bold"),
        visible(
            f"  step {view.step}\nslot {view.slot}  kind {view.kind}  reward {view.reward:g}  client {view.client_id}\n"
        ),
        *(visible(f"{name}: {words}\n") for name, words in describe_narrow_rewards(view).items()),
        f"finished: {', '.join(view.finish_reasons)}\n",
        f"turns: {view.drift}\n",
    )
    yield _legend(view)
    top = max_contribution(view)
    timelines = [list(rows) for _, rows in groupby(view.tokens, key=lambda row: row.timeline)]
    for rows in timelines:
        yield _format_heading(rows)
        yield from portions([*((row.text, _style(row, top)) for row in rows), ("\n", "")])
    headings = ("pos", "id", "mask", "logprob", "trained", "gap", "advantage", "version", "turn", "token")
    for rows in timelines:
        yield _format_heading(rows)
        yield from portions(columns(headings, [_cells(row) for row in rows], [_style(row, top) for row in rows]))


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print the parts. A terminal wraps wider lines; in a pipe they are not wrapped."""
    for part in parts:
        console.print(part, soft_wrap=True, end="")


def logprob_gap(row: TokenRow) -> float | None:
    """Return the training log-probability minus the sampling log-probability of a token."""
    if row.logprob is None or row.logprob_trained is None:
        return None
    return row.logprob_trained - row.logprob


def training_mark(row: TokenRow) -> str:
    """Return the mark that says whether the token is trained, or why it is not or only in part."""
    return "out" if row.left_out else MARKS[row.effect] if row.trained else "0"


def _format_heading(rows: Sequence[TokenRow]) -> Text:
    trained = sum(row.trained for row in rows)
    return Text(f"\ntimeline {rows[0].timeline}: {count_of(len(rows), 'token')}, {trained} trained\n", "bold")


def _cells(row: TokenRow) -> tuple[str, ...]:
    return (
        str(row.position),
        str(row.token_id),
        training_mark(row),
        *(
            "" if value is None else f"{value:.4f}"
            for value in (row.logprob, row.logprob_trained, logprob_gap(row), row.advantage)
        ),
        "" if row.version is None else str(row.version),
        "" if row.turn is None else str(row.turn),
        repr(row.text)[1:-1],
    )


def columns(
    headings: Sequence[str], cells: Sequence[Sequence[str]], styles: Iterable[str] | None = None, *, words: int = 1
) -> Iterator[Styled]:
    """Yield the lines of a table whose last `words` columns are text and the others numbers; `styles`: styles of the last
    column."""
    table = [headings, *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    figures = len(headings) - words
    for row, style in zip(table, chain(["bold"], styles or repeat("", len(cells))), strict=True):
        before = [
            cell.ljust(width) if number >= figures else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row[:-1], widths[:-1], strict=True))
        ]
        yield " ".join(before) + " ", "bold" if row is headings else ""
        yield row[-1], style
        yield "\n", ""


def portions(pieces: Iterable[Styled]) -> Iterator[Segments]:
    """Yield pieces of text, with harmful characters made visible, in portions."""
    merged = (
        Segment(visible("".join(text for text, _ in run)), Style.parse(style))
        for style, run in groupby(pieces, key=operator.itemgetter(1))
    )
    while portion := list(islice(merged, PORTION)):
        yield Segments(portion)


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())


def _legend(view: EpisodeView) -> Text:
    if view.training_recorded:
        return Text.assemble(
            "colour: ",
            ("made likelier", "green"), ", ", ("less likely", "red"), ", ",
            ("no advantage", "cyan"), ", ", ("masked or clipped by the loss", "magenta"), ",\n        ",
            ("left out by a filter", "yellow strike"), ", ", ("given", "dim"), "\n",
        )  # fmt: skip
    return Text.assemble(
        "training was not recorded (train.token_log)\ncolour: ",
        ("near certain", "green"), ", ", ("likely", "yellow"), ", ", ("surprising", "bold red"), ", ", ("given", "dim"), "\n",
    )  # fmt: skip


def _style(row: TokenRow, top: float) -> str:
    if row.logprob is None:
        return "dim"
    if row.left_out:
        return "yellow strike"
    if row.effect.cuts:
        return "magenta"
    if row.contribution is None:
        return style_by_surprise(row.logprob)
    if row.contribution == 0:
        return "cyan"
    colour = "green" if row.contribution > 0 else "red"
    return f"bold {colour}" if abs(row.contribution) >= HIGHLIGHT_SHARE * top else colour


def style_by_surprise(logprob: float) -> str:
    """Return the colour of a token by its log-probability when it was sampled."""
    if logprob > FAINT_LOGPROB:
        return "green"
    return "yellow" if logprob > STRONG_LOGPROB else "bold red"
