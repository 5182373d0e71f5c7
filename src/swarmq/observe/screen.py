"""The board as a terminal picture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarmq.observe.board import Board, sparkline

STALE_S = 15.0
"""A part that has not spoken for this long is shown as silent."""


def draw(board: Board, *, now: float, width: int = 100) -> RenderableType:
    """The whole screen: learners, episodes, queues, warnings."""
    parts: list[RenderableType] = [_headline(board, now), _learners(board, width), _flow(board)]
    if any(len(_kinds_of(steps)) > 1 for steps in board.steps.values()):
        parts.append(_kinds(board, width))
    if board.rounds:
        parts.append(_rounds(board, width))
    if board.warnings:
        parts.append(_warnings(board))
    return Panel(Group(*parts), title=f"swarmq · {board.run}", border_style="cyan", width=min(width, 120))


def _headline(board: Board, now: float) -> Text:
    text = Text()
    for source, part in sorted(board.parts.items()):
        silent_s = now - part.at
        style = "green" if silent_s < STALE_S else "red"
        text.append("● ", style=style)
        text.append(source if silent_s < STALE_S else f"{source} (silent {silent_s:.0f} s)")
        text.append("   ")
    for source, stage in sorted(board.stages.items()):
        text.append(f"\n{source}: ", style="dim")
        text.append(stage)
    return text or Text("waiting for the first sign of life ...", style="dim")


def _learners(board: Board, width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2), expand=True)
    for column in ("policy", "phase", "step", "reward", "loss", "k3", "wait/train/push s", "pause ms"):
        table.add_column(column, justify="left" if column in {"policy", "phase"} else "right")
    table.add_column("reward by step", ratio=1)
    policies = sorted({*board.steps, *(s.removeprefix("learner.") for s in board.parts if s.startswith("learner."))})
    for policy in policies:
        state = board.part(f"learner.{policy}")
        steps = list(board.steps.get(policy, ()))
        last = steps[-1] if steps else {}
        rewards = [float(reward) for step in steps if (reward := step.get("reward")) is not None]
        table.add_row(
            policy,
            str(state.get("phase", "-")),
            str(last.get("version", state.get("version", 0))),
            f"{rewards[-1]:.3f}" if rewards else "-",
            _figure(last, "loss", ".4f"),
            _figure(last, "kl_k3", ".1e"),
            "/".join(f"{last.get(k, 0.0):.1f}" for k in ("wait_s", "train_s", "push_s")) if last else "-",
            f"{1e3 * float(last.get('pause_s', 0.0)):.0f}" if last else "-",
            Text(sparkline(rewards, max(10, width // 4), low=0.0), style="green"),
        )
    return table


def _figure(fields: Mapping[str, Any], name: str, form: str) -> str:
    """One that was not finite is null in the event file."""
    value = fields.get(name)
    return "-" if value is None else format(value, form)


def _flow(board: Board) -> RenderableType:
    collector, proxy = board.part("collector"), board.proxies()
    left = Table(box=None, show_header=False, padding=(0, 2))
    for label in ("begun", "open", "finished", "forwarded", "trained", "eval_finished", "duplicates"):
        left.add_row(label.replace("_", " "), str(collector.get(label, 0)))
    for reason, count in sorted((collector.get("dropped") or {}).items()):
        left.add_row(f"dropped: {reason}", str(count))
    middle = Table(box=None, show_header=False, padding=(0, 2))
    middle.add_row("sampled tokens/s", f"{board.tokens_per_s():,.0f}")
    for label in ("calls", "open_calls", "sampled_tokens", "errors", "repaired"):
        middle.add_row(label.replace("_", " "), f"{proxy[label]:,}")
    middle.add_row("drift", f"{proxy['drift_rate']:.1%}")
    for reason, count in sorted(proxy["branches"].items()):
        middle.add_row(f"branch: {reason.replace('_', ' ')}", f"{count:,}")
    if board.evals:
        rewards = [float(fields.get("reward") or 0.0) for _, fields in board.evals]
        middle.add_row("held-out reward", f"{sum(rewards) / len(rewards):.3f} (last {len(rewards)})")
    right = Table(box=None, show_header=False, padding=(0, 2))
    for queue, ready in sorted(board.depths.items()):
        right.add_row(queue.removeprefix(f"swarmq.{board.run}."), f"{ready:,}")
    columns = Table(box=None, expand=True)
    for title in ("episodes", "proxies", "waiting in queues"):
        columns.add_column(title, ratio=1)
    columns.add_row(left, middle, right)
    return columns


def _kinds(board: Board, width: int) -> RenderableType:
    """What each kind of task had of the newest batch, and how its reward came to be."""
    table = Table(box=None, padding=(0, 2), expand=True)
    for column in ("policy", "kind", "groups in the batch", "reward", "solved"):
        table.add_column(column, justify="left" if column in {"policy", "kind"} else "right")
    table.add_column("reward by step", ratio=1)
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
                Text(sparkline(history, max(10, width // 4), low=0.0), style="green"),
            )
    return table


def _kinds_of(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({kind for step in steps for kind in step.get("reward_by_kind", {})})


def _rounds(board: Board, width: int) -> RenderableType:
    """The newest evaluation by kind, with 95 % intervals, and how pass@1 came to be."""
    newest = board.rounds[-1][1]
    lost = newest.get("missing", 0) + newest.get("given_up", 0)
    title = f"evaluation at step {newest['version']}" + (f" ({lost} attempts without a result)" if lost else "")
    table = Table(box=None, padding=(0, 2), expand=True)
    for column in (title, "tasks", "reward", "pass@k"):
        table.add_column(column)
    table.add_column("by round", ratio=1)
    for kind, figures in newest["kinds"].items():
        passed = "  ".join(
            f"@{k} {one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]" for k, one in figures["pass"].items()
        )
        history = [
            float(earlier["kinds"][kind]["reward"])
            for _, earlier in board.rounds
            if earlier["kinds"].get(kind, {}).get("reward") is not None
        ]
        reward = "-" if figures["reward"] is None else f"{figures['reward']:.3f}"
        curve = Text(sparkline(history, max(10, width // 4), low=0.0), style="green")
        table.add_row(kind, str(figures["tasks"]), reward, passed or "-", curve)
    return table


def _warnings(board: Board) -> Text:
    text = Text()
    for at, source, warning in board.warnings:
        text.append(time.strftime("%H:%M:%S ", time.localtime(at)), style="dim")
        text.append(f"{source}: {warning}\n", style="yellow")
    text.rstrip()
    return text
