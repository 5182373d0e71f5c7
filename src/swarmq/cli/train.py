"""`swarmq train`: a small run in one command, from its start to its report."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmq.cli.common import (
    HOST,
    JOB,
    SETS,
    main,
    print_warnings,
    private_files,
    require_extras,
    run_until_signalled,
)
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.runtime.terminal import visible

if TYPE_CHECKING:
    from swarmq import SwarmTask


@main.command("train")
@JOB
@click.option(
    "--agent",
    "agents",
    multiple=True,
    default=("agent:attempt",),
    show_default=True,
    metavar="[KIND=]TARGET",
    help="Function (module:function) or environment that attempts the tasks, as for `swarmq worker`.",
)
@click.option(
    "--tasks",
    multiple=True,
    metavar="[KIND=]DATA",
    help="Tasks, as for `swarmq feed`; tasks.jsonl beside JOB by default, or those of an environment.",
)
@click.option(
    "--held-out",
    multiple=True,
    metavar="[KIND=]DATA",
    help="Tasks that are never trained; their reward is measured before and after.",
)
@click.option(
    "--curriculum",
    "curricula",
    multiple=True,
    metavar="[KIND=]MODULE:FUNCTION",
    help="Function that orders the tasks of each epoch, as for `swarmq feed`; they are shuffled by default.",
)
@click.option(
    "--concurrency", default=16, show_default=True, type=click.IntRange(min=1), help="Concurrent episodes per kind."
)
@click.option(
    "--offline",
    metavar="FILE|RUN",
    help="Attempt each task once on the answers recorded there (JSON lines, or an earlier run): no broker, engine or learner.",
)
@click.option("--plain", is_flag=True, help="Print lines instead of a live display.")
@SETS
def train_command(
    job: Path,
    agents: tuple[str, ...],
    tasks: tuple[str, ...],
    held_out: tuple[str, ...],
    curricula: tuple[str, ...],
    concurrency: int,
    offline: str | None,
    plain: bool,
    sets: tuple[str, ...],
) -> None:
    """Train an agent in one command, up to its report.

    Starts every process of the job on this host, feeds the tasks, attempts them with the agent, and stops after the last step
    (train.max_steps). Ctrl-C stops everything in order, and the same command continues. Ends with the rewards before and after, what
    was not trained and why, and the checkpoint, also in report.md in the run folder.

    \b
    swarmq train job.toml                             `attempt` of agent.py attempts the tasks of tasks.jsonl
    swarmq train job.toml --agent my_agent:attempt --tasks train.jsonl --held-out test.jsonl
    swarmq train job.toml --curriculum my_tasks:easy_first
    swarmq train job.toml --agent "gymnasium:FrozenLake-v1" --held-out "gymnasium:FrozenLake-v1"
    swarmq train job.toml --offline answers.jsonl     debug agent and reward, without a GPU
    """
    settings = SwarmJob.load(job, sets=sets)
    if offline:
        if curricula:
            raise ConfigError("--curriculum cannot be combined with --offline, which attempts each task once")
        _train_offline(settings, agents, tasks, offline, beside=job.parent / "tasks.jsonl")
        return
    require_extras(*HOST)
    from rich.console import Console

    from swarmq.whole_run.plan import make_plan
    from swarmq.whole_run.run import train

    plan = make_plan(
        settings, agents, tasks, held_out, curricula, beside=job.parent / "tasks.jsonl", concurrency=concurrency
    )
    console = Console(force_terminal=False if plain else None)
    with private_files():
        run_until_signalled(train(plan, console))


def _train_offline(
    job: SwarmJob, agents: tuple[str, ...], tasks: tuple[str, ...], source: str, *, beside: Path
) -> None:
    require_extras("proxy", "inspect")
    from swarmq.offline.recording import read_recording
    from swarmq.offline.run import run_offline
    from swarmq.whole_run.plan import choose_agents, choose_tasks, load_agents

    recording, targets = read_recording(source), choose_agents(job, agents)
    chosen: list[tuple[str | None, SwarmTask]] = [(None, task) for task in recording.tasks]
    if tasks or not chosen:
        found = choose_tasks(job, targets, tasks, beside=beside)
        chosen = [(kind, task) for kind, data in found.items() for task in data.tasks]
    functions = load_agents(targets)
    with print_warnings():
        tally = asyncio.run(run_offline(job, recording, functions, chosen, lambda line: click.echo(visible(line))))
    sys.exit(int(tally.failed > 0))
