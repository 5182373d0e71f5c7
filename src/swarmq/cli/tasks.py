"""`swarmq feed` publishes tasks to the queue of a kind; `swarmq worker` attempts them."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from swarmq.cli.common import RUN, main, run_until_signalled
from swarmq.config import RunFolder
from swarmq.errors import ConfigError, TaskError
from swarmq.messages import new_id
from swarmq.runtime.wording import count_of


@main.command()
@RUN
@click.argument("data")
@click.option("--kind", help="Task kind; required if the job has several.")
@click.option(
    "--repeats", type=click.IntRange(min=1), help="Attempts per task and epoch; the group size of the kind by default."
)
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(min=1), help="Passes over the tasks.")
@click.option("--seed", type=int, help="Shuffle with this seed, differently in each epoch.")
@click.option("--curriculum", metavar="MODULE:FUNCTION", help="Function that orders the tasks of each epoch.")
@click.option("--limit", type=click.IntRange(min=1), help="Feed only the first N tasks of DATA.")
@click.option("--require", multiple=True, metavar="FIELD", help="Field that every row must have; may be repeated.")
@click.option("--restart", is_flag=True, help="Begin again instead of continuing where the last feed stopped.")
@click.option(
    "--eval",
    "for_eval",
    is_flag=True,
    help="Use the tasks for evaluation every `eval.every` steps, never for training.",
)
def feed(
    run: Path,
    data: str,
    kind: str | None,
    repeats: int | None,
    epochs: int,
    seed: int | None,
    curriculum: str | None,
    limit: int | None,
    require: tuple[str, ...],
    restart: bool,
    for_eval: bool,
) -> None:
    """Put a data set on the task queue of a kind.

    Workers (`swarmq worker`) on any machine attempt its tasks.

    DATA is a .jsonl, .csv or .parquet file, a folder or `hf:NAME:SPLIT` of Hugging Face datasets, an environment
    (`verifiers:NAME`, `gymnasium:ID`, `reasoning-gym:NAME`, `openenv:URL`; its training tasks, or with --eval its held-out
    ones), or `module:function` that gives an iterable. All of it is checked before the first task is fed.
    Started again, a killed feed continues exactly where it stopped.

    \b
    swarmq feed runs/demo problems.jsonl --kind math --epochs 3 --seed 0
    swarmq feed runs/demo "reasoning-gym:chain_sum?size=500&seed=1" --kind math
    swarmq feed runs/demo "hf:openai/gsm8k:train?name=main" --require question --require answer
    swarmq feed runs/demo problems.jsonl --epochs 3 --curriculum my_tasks:easy_first
    swarmq feed runs/demo held-out.jsonl --kind math --eval --repeats 4
    """
    kind, data, tasks = plan_feed(
        data,
        kind,
        epochs=epochs,
        seed=seed,
        curriculum=curriculum,
        limit=limit,
        require=require,
        restart=restart,
        for_eval=for_eval,
    )
    if for_eval:
        run_until_signalled(_feed_eval(run, data, tasks, kind=kind, repeats=repeats))
        return
    feeding = _feed(
        run,
        data,
        tasks,
        kind=kind,
        repeats=repeats,
        epochs=epochs,
        seed=seed,
        curriculum=curriculum,
        restart=new_id() if restart else "",
    )
    run_until_signalled(feeding)


class FeedPlan(NamedTuple):
    kind: str | None
    data: str
    read: Callable[[], Iterator[Any]]
    """Reads the tasks of the data set."""


def plan_feed(
    data: str,
    kind: str | None,
    *,
    epochs: int,
    seed: int | None,
    curriculum: str | None,
    limit: int | None,
    require: tuple[str, ...],
    restart: bool,
    for_eval: bool,
) -> FeedPlan:
    """Return what the options of `swarmq feed` ask for. Raises ConfigError if they contradict each other."""
    from swarmq.client.runners.worker_processes import split_kind
    from swarmq.environments import is_environment

    named, target = split_kind(data)
    if named and is_environment(target):
        if kind not in (None, named):
            raise ConfigError(f"{data} names kind {named!r}, and --kind names {kind!r}: give one of them")
        kind, data = named, target
    unused = {"--epochs": epochs != 1, "--seed": seed is not None, "--curriculum": curriculum, "--restart": restart}
    if for_eval and (given := [name for name, used in unused.items() if used]):
        raise ConfigError(
            f"{', '.join(given)}: cannot be combined with --eval, whose tasks are stored and attempted in every round; "
            "a task that is fed again replaces its earlier version"
        )
    if curriculum and seed is not None:
        raise ConfigError("--seed shuffles the tasks and --curriculum orders them: give one of them")
    return FeedPlan(kind, data, functools.partial(_read_tasks, data, limit=limit, require=require, for_eval=for_eval))


def _read_tasks(data: str, *, limit: int | None, require: tuple[str, ...], for_eval: bool) -> Iterator[Any]:
    from swarmq.client.data.readers import read_tasks
    from swarmq.environments import is_environment, load_environment

    rows = load_environment(data).tasks("eval" if for_eval else "train") if is_environment(data) else None
    return read_tasks(data, limit=limit, require=require, rows=rows)


async def _feed_eval(
    run: Path, data: str, read: Callable[[], Iterator[Any]], *, kind: str | None, repeats: int | None
) -> None:
    from swarmq.client.data.tasks import hash_source_name
    from swarmq.observe.feeding import feed_evaluation

    fed = await feed_evaluation(
        RunFolder(run), read(), kind, option="--kind", repeats=repeats, source=hash_source_name(data)
    )
    click.echo(f"stored {count_of(fed.published, 'task')} for evaluation of {fed.kind}")
    if not fed.job.eval.every:
        click.echo(f"evaluation is off; to evaluate every 10 steps: swarmq set {run} eval.every=10")


async def _feed(
    run: Path,
    data: str,
    read: Callable[[], Iterator[Any]],
    *,
    kind: str | None,
    repeats: int | None,
    epochs: int,
    seed: int | None,
    curriculum: str | None,
    restart: str,
) -> None:
    from rich.progress import Progress

    from swarmq.client.data.tasks import hash_source_name
    from swarmq.observe.feeding import feed_training

    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task(f"feeding {kind or 'tasks'}", total=None, visible=False)
        try:
            fed = await feed_training(
                RunFolder(run),
                read(),
                kind,
                option="--kind",
                source=hash_source_name(data),
                repeats=repeats,
                epochs=epochs,
                seed=seed,
                curriculum=curriculum,
                restart=restart,
                report=lambda done, total: progress.update(bar, completed=done, total=total, visible=True),
            )
        except asyncio.CancelledError:
            raise TaskError(
                "stopped before every task was on the queue; the same command without --restart continues"
            ) from None
    click.echo(f"published {count_of(fed.published, 'slot')}")


@main.command()
@click.argument("targets", nargs=-1, required=True)
@click.option("--invite", help="Invite text, file or run folder; $SWARMQ_INVITE by default.")
@click.option("--kind", "kinds", multiple=True, help="Task kind; required if the run has several; may be repeated.")
@click.option(
    "--concurrency",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Concurrent episodes per kind and process.",
)
@click.option(
    "--processes",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Worker processes; more than one for CPU-bound agents.",
)
@click.option(
    "--max-attempts",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Attempts at a task before it is given up.",
)
@click.option(
    "--attempt-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Seconds after which an attempt fails; two hours by default.",
)
def worker(
    targets: tuple[str, ...],
    invite: str | None,
    kinds: tuple[str, ...],
    concurrency: int,
    processes: int,
    max_attempts: int,
    attempt_timeout: float | None,
) -> None:
    """Attempt the tasks of a queue with a function or environment.

    The function, named as `module:function`, takes an episode and returns a reward. An environment (`verifiers:NAME`,
    `gymnasium:ID`, `reasoning-gym:NAME`, `openenv:URL`) runs its own rollout and rewards. Start any number of workers, on any
    machine. Ctrl-C finishes the attempts that have begun; the tasks of a killed worker go to other workers.

    \b
    swarmq worker my_agent:attempt --kind math --concurrency 32
    swarmq worker math=agents:solve code=agents:write --processes 4
    swarmq worker "gymnasium:FrozenLake-v1?is_slippery=false" --kind lake
    swarmq worker my_agent:attempt --attempt-timeout 900        a function that hangs fails its episode, and is tried again
    """
    from swarmq import AsyncSwarmClient
    from swarmq.client.episodes.invite_lookup import find_invite
    from swarmq.client.runners.attempts import ATTEMPT_TIMEOUT_S, AgentFunction, RunnerOptions
    from swarmq.client.runners.worker_processes import parse_targets, run_processes, run_workers
    from swarmq.environments import is_environment, load_agent

    plan = RunnerOptions(
        concurrency=concurrency,
        max_attempts=max_attempts,
        attempt_timeout_s=attempt_timeout or ATTEMPT_TIMEOUT_S,
    )
    loaded: dict[str, AgentFunction] = {}
    wanted: dict[str | None, str | AgentFunction] = {}
    for kind, target in parse_targets(targets, kinds).items():
        if is_environment(target) and target not in loaded:
            loaded[target] = load_agent(target)
        wanted[kind] = loaded.get(target, target)
    if processes > 1:
        run_processes(find_invite(invite), wanted, processes, plan)
        return
    for kind, summary in run_workers(AsyncSwarmClient(invite), wanted, plan).items():
        click.echo(f"{kind}: {summary}")
