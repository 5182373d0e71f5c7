"""An episode as a self-contained HTML page without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from swarmq.observe.inspect.read import EpisodeView, TokenRow, describe_narrow_rewards, max_contribution
from swarmq.observe.inspect.terminal import logprob_gap, training_mark
from swarmq.runtime.wording import count_of

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --faint: #7a8594; --line: #dde3ea; --paper: #ffffff; --band: #f5f7f9;
        --up: 22, 140, 70; --down: 205, 45, 45; --none: 40, 130, 170; --cut: 140, 60, 200; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --faint: #8492a3; --line: #2c3743; --paper: #12181f; --band: #1a222b;
          --up: 60, 190, 105; --down: 240, 90, 90; --none: 90, 180, 220; --cut: 185, 120, 240; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 72rem; padding: 0 1.5rem; }
h1 { font-size: 1.15rem; font-family: ui-monospace, monospace; } h2 { font-size: 1rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { color: var(--faint); } dd { margin: 0; }
.text { font: 14px/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--band);
        border: 1px solid var(--line); border-radius: 8px; padding: 1rem; }
i, b { font-style: normal; font-weight: inherit; } i { color: var(--faint); } b { border-radius: 3px; }
b.out, td.out { text-decoration: line-through; opacity: .6; }
.legend b, .legend i { padding: .1rem .4rem; margin-right: .5rem; }
table { border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace; margin-top: .8rem; }
th { position: sticky; top: 0; background: var(--paper); text-align: right; color: var(--faint); font-weight: normal; }
td, th { padding: .05rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
td:nth-child(3), th:nth-child(3) { text-align: left; white-space: pre; }
tr.given { color: var(--faint); } summary { cursor: pointer; color: var(--faint); margin-top: 1rem; }
"""
HEADINGS = (
    "position",
    "id",
    "token",
    "mask",
    "logprob sampled",
    "logprob trained",
    "gap",
    "advantage",
    "version",
    "turn",
)
WEAKEST, SPAN = 0.12, 0.55
"""Background opacity of a token with almost no contribution, and the addition for the largest contribution."""


def render_page(view: EpisodeView) -> str:
    """Return the HTML document of an episode."""
    facts = {
        "slot": view.slot,
        "kind": view.kind,
        "reward": f"{view.reward:g}",
        **describe_narrow_rewards(view),
        "trained in step": str(view.step),
        "client": view.client_id,
        "finished": ", ".join(view.finish_reasons),
        "turns": str(view.drift),
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(view.episode_id)}</title>'
        f"<style>{STYLE}</style><h1>{escape(view.episode_id)}</h1><dl>{items}</dl>{_legend(view)}"
        f"{''.join(_timelines(view))}</html>\n"
    )


def _legend(view: EpisodeView) -> str:
    if not view.training_recorded:
        return (
            "<p class=legend>Training was not recorded (<code>train.token_log</code>). "
            f"<b {_colour('none', 1.0)}>surprising</b><b {_colour('none', 0.0)}>near certain</b><i>given</i></p>"
        )
    return (
        f"<p class=legend><b {_colour('up', 1.0)}>made likelier</b><b {_colour('down', 1.0)}>made less likely</b>"
        f"<b {_colour('none', 0.0)}>no advantage</b><b {_colour('cut', 0.0)}>masked or clipped by the loss</b><b class=out>left out by a filter</b><i>given</i>"
        "The stronger the colour, the larger advantage &times; mask.</p>"
    )


def _timelines(view: EpisodeView) -> Iterator[str]:
    top = max_contribution(view)
    for number, members in groupby(view.tokens, key=lambda row: row.timeline):
        rows = list(members)
        trained = sum(row.trained for row in rows)
        yield f"<h2>Timeline {number}: {count_of(len(rows), 'token')}, {trained} trained</h2><div class=text>"
        for row in rows:
            tag = "b" if row.trained else "i"
            yield f"<{tag}{_style_token(row, top)} title='{escape(_hint(row))}'>{escape(row.text)}</{tag}>"
        yield f"</div><details{' open' if number == 0 else ''}><summary>every token</summary><table><tr>"
        yield "".join(f"<th>{heading}</th>" for heading in HEADINGS) + "</tr>"
        for row in rows:
            yield f"<tr{'' if row.trained else ' class=given'}>{''.join(_cells(row, top))}</tr>"
        yield "</table></details>"


def _cells(row: TokenRow, top: float) -> Iterator[str]:
    yield f"<td>{row.position}</td><td>{row.token_id}</td>"
    yield f"<td{_style_token(row, top)}>{escape(repr(row.text)[1:-1])}</td>"
    yield f"<td>{training_mark(row)}</td>"
    for value in (row.logprob, row.logprob_trained, logprob_gap(row), row.advantage):
        yield f"<td>{'' if value is None else f'{value:.4f}'}</td>"
    yield f"<td>{'' if row.version is None else row.version}</td><td>{'' if row.turn is None else row.turn}</td>"


def _hint(row: TokenRow) -> str:
    text = f"id {row.token_id}"
    for name, value in (("sampled", row.logprob), ("trained", row.logprob_trained), ("advantage", row.advantage)):
        if value is not None:
            text += f", {name} {value:.4f}"
    return text if row.version is None else f"{text}, weights {row.version}, turn {row.turn}"


def _style_token(row: TokenRow, top: float) -> str:
    """Return the HTML attributes of a token's element."""
    if row.logprob is None:
        return ""
    if row.left_out:
        return " class=out"
    if row.effect.cuts:
        return " " + _colour("cut", 0.0)
    if row.contribution is None:
        return " " + _colour("none", min(-row.logprob / 4, 1.0))
    if row.contribution == 0:
        return " " + _colour("none", 0.0)
    strength = min(1.0, abs(row.contribution) / top)  # 1 for NaN
    return " " + _colour("up" if row.contribution > 0 else "down", strength)


def _colour(name: str, strength: float) -> str:
    return f'style="background:rgba(var(--{name}),{WEAKEST + SPAN * strength:.2f})"'
