"""Rendering of the board in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarmq.broker.node.files import ALARM_TEXT
from swarmq.observe.board import Board, ProcessState, condense, sparkline
from swarmq.runtime.wording import count_of

STALE_S = 15.0
"""Seconds without an event after which a process is shown as silent."""
MIN_WIDE_COLUMNS = 110
"""Minimum width, in columns, of a terminal that shows DETAILS in the learners' table."""
DETAILS = ("k3", "wait/train/push s", "pause ms")
PROXIES = "proxies since their start"
"""Heading of the proxies' counters, which begin at 0 with each process, unlike the episodes' counters."""
DAY_S = 86_400.0
METRICS, METRIC_WIDTH = 12, 24
"""Maximum number of metrics of a kind on the screen, and maximum characters of their names; `--json` shows all in full."""
NAME_WIDTH, PHASE_WIDTH, CURVE_WIDTH = 16, len("training"), 14


def draw(board: Board, *, now: float, width: int = 100) -> RenderableType:
    """Render the whole screen: learners, episodes, queues, warnings."""
    parts: list[RenderableType] = [_headline(board, now), _learners(board, width), _flow(board, width)]
    if any(len(_kinds_of(steps)) > 1 for steps in board.steps.values()):
        parts.append(_kinds(board, width))
    if any(steps[-1].get("metrics_by_kind") for steps in board.steps.values()):
        parts.append(_metrics(board))
    if board.rounds:
        parts.append(_rounds(board, width))
    if board.warnings:
        parts.append(_warnings(board, now))
    pace = board.reported("collector").get("pace", "running")
    title = f"swarmq · {board.run}" + ("" if pace == "running" else f" · {pace.upper()}")
    return Panel(Group(*parts), title=title, border_style="cyan", width=min(width, 120))


def _headline(board: Board, now: float) -> Text:
    text = Text()
    if board.blocked:
        text.append(f"{ALARM_TEXT}\n", style="red")
    for source, process in sorted(board.processes.items()):
        style, state = _style_state(process, now)
        text.append("● ", style=style)
        text.append(f"{source}{state}   ")
    for source, stage in sorted(board.stages.items()):
        text.append(f"\n{source}: ", style="dim")
        text.append(stage)
    if not (board.processes or board.stages):
        text.append("waiting for the first event ...", style="dim")
    return text


def _style_state(process: ProcessState, now: float) -> tuple[str, str]:
    """Return the colour of a process's state, and the text that follows its name."""
    if process.fields.get("phase") == "ended":
        return "dim", " (ended)"
    silent_s = now - process.at
    return ("green", "") if silent_s < STALE_S else ("red", f" (silent {silent_s:.0f} s)")


def _learners(board: Board, width: int) -> RenderableType:
    """Render a row per policy; on narrow terminals, DETAILS are a table of their own."""
    wide = width >= MIN_WIDE_COLUMNS
    policies = sorted(
        {*board.steps, *(s.removeprefix("learner.") for s in board.processes if s.startswith("learner."))}
    )
    table, below = _table(policy=policies), _table(policy=policies)
    below.expand = False
    table.add_column("phase", no_wrap=True, width=PHASE_WIDTH)
    for column in ("step", "reward", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in DETAILS:
        (table if wide else below).add_column(column, justify="right", no_wrap=True)
    _add_curve(table, "reward by step")
    for policy in policies:
        state = board.reported(f"learner.{policy}")
        steps = list(board.steps.get(policy, ()))
        last = steps[-1] if steps else {}
        rewards = [float(reward) for step in steps if (reward := step.get("reward")) is not None]
        details = _details(last)
        table.add_row(
            policy,
            str(state.get("phase", "-")),
            str(last.get("version", state.get("version", 0))),
            f"{rewards[-1]:.3f}" if rewards else "-",
            _figure(last, "loss", ".4f"),
            *(details if wide else ()),
            _curve(rewards, width),
        )
        below.add_row(policy, *details)
    return table if wide or not board.steps else Group(table, below)


def _details(step: Mapping[str, Any]) -> list[str]:
    """Return the values of the columns DETAILS."""
    if not step:
        return ["-"] * len(DETAILS)
    return [
        _figure(step, "kl_k3", ".1e"),
        "/".join(f"{step.get(name, 0.0):.1f}" for name in ("wait_s", "train_s", "push_s")),
        f"{1e3 * float(step.get('pause_s', 0.0)):.0f}",
    ]


def _table(**names: Iterable[str]) -> Table:
    """Return a table with a column for each heading, as wide as its names need."""
    table = Table(box=None, padding=(0, 1), expand=True)
    for heading, those in names.items():
        widest = max(map(len, [heading, *those]))
        table.add_column(heading, no_wrap=True, width=min(widest, NAME_WIDTH))
    return table


def _figure(fields: Mapping[str, Any], name: str, form: str) -> str:
    """Format a number of a step event, in which a number that was not finite is null."""
    value = fields.get(name)
    return "-" if value is None else format(value, form)


def _add_curve(table: Table, heading: str) -> None:
    table.add_column(heading, ratio=1, min_width=CURVE_WIDTH, no_wrap=True)


def _curve(values: list[float], width: int) -> Text:
    """Render rewards as blocks on a scale that includes 0; negative rewards are red."""
    means = condense(values, max(CURVE_WIDTH, width // 4))
    blocks = sparkline(means, low=min(0.0, *means, 0.0), high=max(0.0, *means, 0.0))
    return Text.assemble(*((block, "red" if mean < 0 else "green") for block, mean in zip(blocks, means, strict=True)))


def _flow(board: Board, width: int) -> RenderableType:
    collector, proxy = board.reported("collector"), board.proxies()
    left = Table(box=None, show_header=False, padding=(0, 1))
    for label in ("begun", "open", "finished", "forwarded", "trained", "eval_finished", "duplicates"):
        left.add_row(label.replace("_", " "), str(collector.get(label, 0)))
    for label in ("orphan_turns", "rewards_uncredited"):
        if count := collector.get(label):
            left.add_row(label.replace("_", " "), str(count))
    for reason, count in sorted((collector.get("dropped") or {}).items()):
        left.add_row(f"dropped: {reason}", str(count))
    middle = Table(box=None, show_header=False, padding=(0, 1))
    middle.add_row("sampled tokens/s", f"{board.tokens_per_s():,.0f}")
    for label in ("calls", "open_calls", "sampled_tokens", "errors", "repaired"):
        middle.add_row(label.replace("_", " "), f"{proxy[label]:,}")
    middle.add_row("drift", f"{proxy['drift_rate']:.1%}")
    for reason, count in sorted(proxy["branches"].items()):
        middle.add_row(f"branch: {reason.replace('_', ' ')}", f"{count:,}")
    if held_out := board.held_out():
        version, rewards = held_out
        middle.add_row(f"held-out, version {version}", f"{sum(rewards) / len(rewards):.3f} (n={len(rewards)})")
    queues = {queue.removeprefix(f"swarmq.{board.run}."): ready for queue, ready in sorted(board.depths.items())}
    if width >= MIN_WIDE_COLUMNS:
        right = Table(box=None, show_header=False, padding=(0, 1))
        for queue, ready in queues.items():
            right.add_row(queue, f"{ready:,}")
        return _side_by_side({"episodes": left, PROXIES: middle, "waiting in queues": right})
    waiting = ", ".join(f"{queue} {ready:,}" for queue, ready in queues.items())
    below = Text.assemble(("waiting in queues: ", "bold"), waiting)
    return Group(_side_by_side({"episodes": left, PROXIES: middle}), below)


def _side_by_side(parts: Mapping[str, RenderableType]) -> Table:
    columns = Table(box=None, expand=True)
    for title in parts:
        columns.add_column(title, ratio=1)
    columns.add_row(*parts.values())
    return columns


def _kinds(board: Board, width: int) -> RenderableType:
    """Render each task kind's share of the newest batch, and its reward by step."""
    table = _table(policy=board.steps, kind=[kind for steps in board.steps.values() for kind in _kinds_of(steps)])
    for column in ("groups", "reward", "solved"):
        table.add_column(column, justify="right", no_wrap=True)
    _add_curve(table, "reward by step")
    for policy, steps in sorted(board.steps.items()):
        last = steps[-1]
        for kind in _kinds_of(steps):
            rewards = (step.get("reward_by_kind", {}).get(kind) for step in steps)
            history = [float(reward) for reward in rewards if reward is not None]
            solved = last.get("success_by_kind", {}).get(kind)
            table.add_row(
                policy,
                kind,
                str(last.get("groups_by_kind", {}).get(kind, 0)),
                f"{history[-1]:.3f}" if history else "-",
                "-" if solved is None else f"{solved:.1%}",
                _curve(history, width),
            )
    return table


def _metrics(board: Board) -> Table:
    """Render the means of the agents' metrics in the newest step, a line for each policy and kind."""
    newest = {policy: steps[-1].get("metrics_by_kind") or {} for policy, steps in sorted(board.steps.items())}
    table = _table(policy=newest, kind=[kind for kinds in newest.values() for kind in kinds])
    table.add_column("agents' metrics", ratio=1)
    for policy, kinds in newest.items():
        for kind, means in sorted(kinds.items()):
            table.add_row(policy, kind, _list_means(means))
    return table


def _list_means(means: Mapping[str, Any]) -> str:
    """Format the first METRICS means by name, and the number of the others."""
    names = {name: " ".join(name[:METRIC_WIDTH].split()) for name in sorted(means)}
    shown = [f"{text} {means[name]:.4g}" for name, text in names.items() if means[name] is not None]
    more = [f"and {len(shown) - METRICS} more"] if len(shown) > METRICS else []
    return " · ".join(shown[:METRICS] + more)


def _kinds_of(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({kind for step in steps for kind in step.get("reward_by_kind", {})})


def _rounds(board: Board, width: int) -> RenderableType:
    """Render the newest evaluation by kind with 95 % intervals, and the rewards of earlier rounds."""
    newest = board.rounds[-1][1]
    lost = newest.get("missing", 0) + newest.get("given_up", 0)
    title = f" evaluation at step {newest['version']}" + (
        f" ({count_of(lost, 'attempt')} without a result)" if lost else ""
    )
    table = _table(kind=newest["kinds"])
    for column in ("tasks", "reward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("pass@k", no_wrap=True)
    _add_curve(table, "reward by round")
    for kind, figures in newest["kinds"].items():
        passed = "\n".join(
            f"@{k} {one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]" for k, one in figures["pass"].items()
        )
        history = [
            float(earlier["kinds"][kind]["reward"])
            for _, earlier in board.rounds
            if earlier["kinds"].get(kind, {}).get("reward") is not None
        ]
        reward = "-" if figures["reward"] is None else f"{figures['reward']:.3f}"
        table.add_row(kind, str(figures["tasks"]), reward, passed or "-", _curve(history, width))
    of_agents = {kind: means for kind, figures in newest["kinds"].items() if (means := figures.get("metrics"))}
    below = [Text(f" {kind}: {_list_means(means)}") for kind, means in of_agents.items()]
    return Group(Text(title, "bold"), table, *below)


def _warnings(board: Board, now: float) -> Text:
    text = Text()
    for warned in board.warnings:
        pattern = "%H:%M:%S " if now - warned.at < DAY_S else "%Y-%m-%d %H:%M "
        text.append(time.strftime(pattern, time.localtime(warned.at)), style="dim")
        text.append(f"{warned.source}: {warned.text}", style="yellow")
        text.append(f" ({warned.times} times)\n" if warned.times > 1 else "\n", style="dim")
    text.rstrip()
    return text
