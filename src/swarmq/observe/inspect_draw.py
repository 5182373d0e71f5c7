"""Batches and episodes of a batch log as a terminal shows them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarmq.drift import Drift
from swarmq.messages import new_id
from swarmq.observe.inspect import BatchRow, EpisodeView, TokenRow, strongest

FAINT_LOGPROB, STRONG_LOGPROB = -0.1, -2.0
"""Sampled tokens above the first were near certain, below the second surprising."""
STRONG = 0.5
"""Tokens with at least this share of the episode's largest contribution stand out."""


def draw_batches(batches: Iterable[BatchRow]) -> RenderableType:
    """A row per record, and how much drifted in all of them together."""
    table = Table("step", "episodes", "groups", "dropped", "reward", "drift", "logged", box=None)
    table.add_column("first episode", no_wrap=True, min_width=len(new_id()))
    drift = Drift()
    for row in batches:
        drift += row.drift
        table.add_row(
            "-" if row.step is None else str(row.step),
            str(row.episodes),
            str(row.groups),
            ", ".join(f"{reason} {count}" for reason, count in row.dropped.items()),
            "" if row.reward is None else f"{row.reward:.3f}",
            f"{row.drift.rate:.1%}" if row.drift.continued else "",
            datetime.fromtimestamp(row.at).astimezone().strftime("%H:%M:%S"),
            row.first_episode,
        )
    return Group(table, Text(), Text(f"turns: {drift}"))


def draw_episode(view: EpisodeView) -> RenderableType:
    """Head line, the text coloured by what each token contributed, then a row per token."""
    head = Text.assemble(
        (view.episode_id, "bold"),
        f"  slot {view.slot}  kind {view.kind}  reward {view.reward:g}  step {view.step}  client {view.client_id}\n",
        f"finished: {', '.join(view.finish_reasons)}\n",
        f"turns: {view.drift}\n",
        _legend(view),
    )
    flowing = Text()
    table = Table(
        *("timeline", "pos", "id", "token", "mask", "logprob", "trained", "gap", "advantage", "version", "turn"),
        box=None,
    )
    top = strongest(view)
    for row in view.tokens:
        style = _style(row, top)
        flowing.append(row.text, style=style)
        table.add_row(
            str(row.timeline),
            str(row.position),
            str(row.token_id),
            Text(repr(row.text)[1:-1], style=style),
            "out" if row.left_out else "1" if row.trained else "0",
            *(_number(value) for value in (row.logprob, row.logprob_trained, gap(row), row.advantage)),
            "" if row.version is None else str(row.version),
            "" if row.turn is None else str(row.turn),
        )
    return Group(head, Text(), flowing, Text(), table)


def gap(row: TokenRow) -> float | None:
    """How much likelier the weights that trained find the token than those that sampled it, as a logarithm."""
    if row.logprob is None or row.logprob_trained is None:
        return None
    return row.logprob_trained - row.logprob


def _legend(view: EpisodeView) -> Text:
    if view.training_recorded:
        return Text.assemble(
            "colour: ",
            ("made likelier", "green"), ", ", ("made less likely", "red"), ", ",
            ("no gradient", "cyan"), ", ", ("left out by a filter", "yellow strike"), ", ", ("given", "dim"),
        )  # fmt: skip
    return Text.assemble(
        "training was not recorded (train.token_log); colour: ",
        ("near certain", "green"), ", ", ("likely", "yellow"), ", ", ("surprising", "bold red"), ", ", ("given", "dim"),
    )  # fmt: skip


def _style(row: TokenRow, top: float) -> str:
    if row.logprob is None:
        return "dim"
    if row.left_out:
        return "yellow strike"
    if row.contribution is None:
        return _by_surprise(row.logprob)
    if row.contribution == 0:
        return "cyan"
    colour = "green" if row.contribution > 0 else "red"
    return f"bold {colour}" if abs(row.contribution) >= STRONG * top else colour


def _by_surprise(logprob: float) -> str:
    if logprob > FAINT_LOGPROB:
        return "green"
    return "yellow" if logprob > STRONG_LOGPROB else "bold red"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
