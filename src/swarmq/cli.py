"""The `swarmq` command and the daemons' entry points. Heavy parts are imported when their command runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from swarmq import __version__, keys, live
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import BrokerError, ConfigError, MissingExtraError, SwarmqError
from swarmq.keys import Role
from swarmq.messages import Action

EXTRAS = {
    "proxy": ("litestar", "uvicorn", "aiohttp", "prometheus_client", "uvloop"),
    "learner": ("torch", "transformers", "accelerate", "zstandard"),
    "demo": ("openai", "reasoning_gym", "matplotlib"),
}

SETS = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a setting, e.g. --set groups.group_size=4."
)
JOB = click.argument("job", type=click.Path(path_type=Path))
RUN = click.argument("run", type=click.Path(path_type=Path))


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files that are made meanwhile are their owner's alone: prompts and completions lie in the run folder."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def friendly() -> Iterator[None]:
    """Errors we raise on purpose become one clear line and status 1; anything else is a bug and keeps its traceback."""
    try:
        yield
    except (SwarmqError, BaseExceptionGroup) as error:
        ours, others = _sort(error)
        if others:
            raise
        for line in dict.fromkeys(str(one) for one in ours):
            click.secho(f"swarmq: {line}", fg="red", err=True)
        sys.exit(1)


def _sort(error: BaseException) -> tuple[list[BaseException], list[BaseException]]:
    """The leaves of an error: those we raise on purpose, and the others."""
    if not isinstance(error, BaseExceptionGroup):
        return ([error], []) if isinstance(error, SwarmqError) else ([], [error])
    sorted_children = [_sort(child) for child in error.exceptions]
    return [e for ours, _ in sorted_children for e in ours], [e for _, others in sorted_children for e in others]


class Friendly(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        with friendly():
            return super().invoke(ctx)


def need(extra: str) -> None:
    """Raise MissingExtraError when a package of this extra is not installed."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"this command needs {', '.join(missing)}: pip install 'swarmq[{extra}]'")


def run_until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or until SIGINT or SIGTERM cancels it, so that its `async with` blocks close in order."""

    async def guarded() -> None:
        task = asyncio.ensure_future(main)
        stopping = False

        def stop() -> None:
            nonlocal stopping
            stopping = True
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            await task
        except asyncio.CancelledError:
            if not stopping:
                raise

    asyncio.run(guarded())


@click.group(cls=Friendly, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Train LLM agents with reinforcement learning over a durable message pipeline.

    \b
    swarmq demo                             the whole system on this machine, on a real task
    swarmq up job.toml                      start broker, engines, proxy and learner of a job
    swarmq worker agent:attempt --kind math attempt the tasks of a queue
    swarmq watch runs/NAME                  see what a run is doing
    """


@main.command()
@click.option("--run", default="demo", show_default=True, help="Name of the run; a number is added if it exists.")
@click.option("--folder", default="runs", show_default=True, help="Where run folders go.")
@click.option("--seed", default=0, show_default=True, help="Seed of sampling, tasks and training.")
@click.option("--model", help="A Hugging Face model folder or name to train instead of the demo's own small model.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps; fewer make a shorter demo.")
@click.option("--plain", is_flag=True, help="Lines instead of a live picture.")
@SETS
def demo(
    run: str, folder: str, seed: int, model: str | None, steps: int | None, plain: bool, sets: tuple[str, ...]
) -> None:
    """Train a real agent on this machine: no GPU, no docker, about ten minutes.

    \b
    swarmq demo                       the whole story, with a client killed in the middle
    swarmq demo --seed 1 --steps 20   shorter, another seed
    swarmq demo --model Qwen/Qwen3-0.6B --set policies.main.train.learning_rate=1e-6
    """
    need("learner")
    need("proxy")
    need("demo")
    import msgspec
    from rich.console import Console

    from swarmq.demo.run import DemoOptions, run_demo

    options = DemoOptions(run=run, folder=folder, seed=seed, model=model, sets=sets)
    if steps:
        options = msgspec.structs.replace(options, size=msgspec.structs.replace(options.size, steps=steps))
    console = Console(force_terminal=False if plain else None)

    async def play() -> None:
        await run_demo(options, console)

    with private_files():
        run_until_signalled(play())


@main.command()
@JOB
@SETS
@click.option("--show", is_flag=True, help="Print every resolved setting as TOML and stop.")
def up(job: Path, sets: tuple[str, ...], show: bool) -> None:
    """Start every part of a job on this host and keep it running until Ctrl-C.

    Starts RabbitMQ (unless broker.url or $SWARMQ_AMQP_URL names one), vLLM, the proxy, the collector and a learner for
    each trained policy. Prints the invite that clients start from.

    \b
    swarmq up job.toml
    swarmq up job.toml --set policies.main.train.learning_rate=1e-5 --set run=second
    """
    settings = SwarmJob.load(job, sets=sets)
    if show:
        click.echo(settings.to_toml(), nl=False)
        return
    need("proxy")
    need("learner")
    with private_files():
        run_until_signalled(_up(settings))


async def _up(job: SwarmJob) -> None:
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.observe.monitor import recorded
    from swarmq.up import deploy

    began = time.monotonic()

    def report(text: str) -> None:
        click.echo(f"{time.monotonic() - began:6.1f} s  {text}")

    async with (
        deploy(job, report=report) as deployment,
        AmqpBroker.open(deployment.invite.amqp_url, name="swarmq up events", deadline_s=None) as broker,
        recorded(deployment.job, broker),
    ):
        report(f"up. Clients join with the line in {job.run_folder.invite}:")
        click.echo(f"export SWARMQ_INVITE={deployment.invite.encode()}")
        if node := deployment.node:
            report(f"queues: {node.management_url}, user {node.user}, password {node.password}")
        report("Ctrl-C stops everything")
        await deployment.learners_done.wait()
        report("every learner has reached its last step; engines and proxy stay up until Ctrl-C")
        await asyncio.Event().wait()


@main.command()
@RUN
@click.option("--once", is_flag=True, help="Print one picture and stop.")
def watch(run: Path, once: bool) -> None:
    """Follow a run in the terminal: steps, rewards, queues, warnings.

    \b
    swarmq watch runs/demo
    """
    run_until_signalled(_watch(run, once=once))


@main.command()
@RUN
def status(run: Path) -> None:
    """Say in one picture what a run is doing right now (the same as `swarmq watch --once`).

    \b
    swarmq status runs/demo
    """
    run_until_signalled(_watch(run, once=True))


async def _watch(run: Path, *, once: bool) -> None:
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.observe.monitor import glance, watch

    job = _resolved(run)
    async with AmqpBroker.open(job.broker.url or "", name="swarmq watch") as broker:
        await (glance(job, broker) if once else watch(job, broker))


@main.command("set")
@RUN
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_command(run: Path, settings: tuple[str, ...]) -> None:
    """Change settings while the run is up: all of those given, or none.

    The answer says what changed and from which step on. A change survives restarts until the job file itself is
    edited at that place. What needs a restart is refused.

    \b
    swarmq set runs/demo policies.main.train.learning_rate=1e-6
    swarmq set runs/demo 'mix={math = 0.6, code = 0.4}' groups.when_dry=lend
    swarmq set runs/demo policies.main.sampling.temperature=0.9 kinds.code.group_size=4
    """
    from swarmq.config import assignments

    run_until_signalled(_ask(run, "set", assignments(settings)))


@main.command()
@RUN
def pause(run: Path) -> None:
    """Hold learners at their next step border and issue no tickets; what has begun goes on and waits.

    \b
    swarmq pause runs/demo     # change something, then: swarmq resume runs/demo
    """
    run_until_signalled(_ask(run, "pause"))


@main.command()
@RUN
def drain(run: Path) -> None:
    """Issue no tickets, and train what is under way; `swarmq watch` says when it is done.

    \b
    swarmq drain runs/demo     # before the workers are taken away, say
    """
    run_until_signalled(_ask(run, "drain"))


@main.command()
@RUN
def resume(run: Path) -> None:
    """Go on after `swarmq pause` or `swarmq drain`.

    \b
    swarmq resume runs/demo
    """
    run_until_signalled(_ask(run, "resume"))


@main.command()
@RUN
def checkpoint(run: Path) -> None:
    """Write a checkpoint of every trained policy at its next step border.

    \b
    swarmq checkpoint runs/demo
    """
    run_until_signalled(_ask(run, "checkpoint"))


@main.command()
@RUN
@click.option("--after", type=click.IntRange(min=0), required=True, metavar="STEP", help="The last step.")
@click.option("--policy", help="Only this one; all trained ones by default.")
def stop(run: Path, after: int, policy: str | None) -> None:
    """Let learners end after a step, with a checkpoint.

    \b
    swarmq stop runs/demo --after 200
    swarmq stop runs/team --after 200 --policy planner
    """
    job = _resolved(run)
    chosen = [_one_policy(job, policy)] if policy else [name for name, one in job.policies.items() if one.trained]
    run_until_signalled(_ask(run, "set", {f"policies.{name}.train.max_steps": after for name in chosen}))


async def _ask(run: Path, action: Action, settings: dict[str, Any] | None = None) -> None:
    import getpass

    from swarmq.broker.amqp import AmqpBroker
    from swarmq.observe.operate import ask, lines

    job = _resolved(run)
    async with AmqpBroker.open(job.broker.url or "", name=f"swarmq {action}") as broker:
        await broker.declare(job.run, policies=[], kinds=[])
        for line in lines(await ask(broker, job.run, action, settings, sender=getpass.getuser())):
            click.echo(line)


def _resolved(run: Path) -> SwarmJob:
    """The settings of a run that is up, by its folder."""
    path = run / "resolved.toml"
    if not path.exists():
        raise ConfigError(
            f"{run}: not the folder of a run that was up (no resolved.toml); it is runs/NAME by default. Where the parts "
            "are started one by one, `swarmq invite JOB` makes it"
        )
    return SwarmJob.load(path)


@main.command()
@RUN
@click.argument("data")
@click.option("--kind", help="Task kind; needed when the job has several.")
@click.option(
    "--repeats", type=click.IntRange(min=1), help="Attempts per task and epoch; the job's group size by default."
)
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", type=int, help="Shuffle, differently in each epoch.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N tasks of DATA.")
@click.option("--require", multiple=True, metavar="FIELD", help="A field that every row must have; may be repeated.")
@click.option("--restart", is_flag=True, help="Begin again instead of going on where the last feed stopped.")
@click.option(
    "--eval", "for_eval", is_flag=True, help="Tasks to evaluate with every `eval.every` steps, never to train."
)
def feed(
    run: Path,
    data: str,
    kind: str | None,
    repeats: int | None,
    epochs: int,
    seed: int | None,
    limit: int | None,
    require: tuple[str, ...],
    restart: bool,
    for_eval: bool,
) -> None:
    """Put a data set on the task queue of a kind, for `swarmq worker` anywhere to attempt.

    DATA is a .jsonl, .csv or .parquet file, a folder or `hf:NAME:SPLIT` of Hugging Face datasets, `reasoning-gym:NAME`,
    `verifiers:NAME`, or `module:function` that gives an iterable. All of it is checked before the first task is fed.
    Killed and started again it goes on exactly where it was.

    \b
    swarmq feed runs/demo problems.jsonl --kind math --epochs 3 --seed 0
    swarmq feed runs/demo "reasoning-gym:chain_sum?size=500&seed=1" --kind math
    swarmq feed runs/demo "hf:openai/gsm8k:train?name=main" --require question --require answer
    swarmq feed runs/demo held-out.jsonl --kind math --eval --repeats 4
    """
    tasks = functools.partial(_read_tasks, data, limit=limit, require=require)
    if for_eval:
        unused = {"--epochs": epochs != 1, "--seed": seed is not None, "--restart": restart}
        if given := [name for name, used in unused.items() if used]:
            raise ConfigError(
                f"{', '.join(given)}: without meaning beside --eval, whose tasks are kept and attempted in every round; "
                "brought again they replace themselves"
            )
        run_until_signalled(_feed_eval(run, data, tasks, kind=kind, repeats=repeats))
        return
    run_until_signalled(
        _feed(run, data, tasks, kind=kind, repeats=repeats, epochs=epochs, seed=seed, resume=not restart)
    )


def _read_tasks(data: str, *, limit: int | None, require: tuple[str, ...]) -> Iterator[Any]:
    from swarmq.client.readers import read_tasks

    return read_tasks(data, limit=limit, require=require)


async def _feed_eval(
    run: Path, data: str, read: Callable[[], Iterator[Any]], *, kind: str | None, repeats: int | None
) -> None:
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.client.tasks import source_mark
    from swarmq.observe.operate import bring_eval_tasks

    job = _resolved(run)
    chosen = _one_kind(job, kind)
    async with AmqpBroker.open(job.broker.url or "", name="swarmq feed --eval") as broker:
        count = await bring_eval_tasks(
            broker, job, read(), chosen, repeats=repeats or max(job.eval.k), source=source_mark(data)
        )
    click.echo(f"{count} tasks to evaluate {chosen} with")
    if not job.eval.every:
        click.echo(f"no round is held yet: swarmq set {run} eval.every=10")


def _one_kind(job: SwarmJob, kind: str | None) -> str:
    """The kind that is meant. Raises ConfigError when that is not clear."""
    chosen = kind or (next(iter(job.mix)) if len(job.mix) == 1 else None)
    if chosen not in job.task_kinds:
        raise ConfigError(f"--kind {kind}: the kinds of this job are {', '.join(job.task_kinds)}")
    return chosen


async def _feed(
    run: Path,
    data: str,
    read: Callable[[], Iterator[Any]],
    *,
    kind: str | None,
    repeats: int | None,
    epochs: int,
    seed: int | None,
    resume: bool,
) -> None:
    from rich.progress import Progress

    from swarmq.broker.amqp import AmqpBroker
    from swarmq.client.feed import default_progress_file, feed
    from swarmq.client.tasks import source_mark
    from swarmq.collector.ledger import changes

    job = _resolved(run)
    job = live.applied(job, changes(job.run_folder.inbox))
    chosen = _one_kind(job, kind)
    async with AmqpBroker.open(job.broker.url or "", name="swarmq feed") as broker:
        with Progress() as progress:
            bar = progress.add_task(f"feeding {chosen}", total=None)
            fed = await feed(
                broker,
                job.run,
                read(),
                chosen,
                repeats=repeats or job.group_size(chosen),
                epochs=epochs,
                seed=seed,
                progress_file=default_progress_file(job.run_folder.path, job.run, chosen, source_mark(data)),
                source=source_mark(data),
                resume=resume,
                report=lambda done, total: progress.update(bar, completed=done, total=total),
            )
    click.echo(f"{fed} slots put on the queue")


@main.command()
@click.argument("targets", nargs=-1, required=True)
@click.option("--invite", help="Invite text, file or run folder; $SWARMQ_INVITE by default.")
@click.option("--kind", "kinds", multiple=True, help="Task kind; needed when the run has several. May be repeated.")
@click.option(
    "--concurrency",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Episodes at a time, per kind and process.",
)
@click.option("--processes", default=1, show_default=True, type=click.IntRange(min=1), help="For agents that compute.")
@click.option(
    "--max-attempts",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Attempts per task before it is given up.",
)
@click.option(
    "--attempt-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="An attempt that takes longer has failed; two hours by default.",
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
    """Attempt the tasks of a queue with a `module:function` that takes an episode and returns a reward.

    Start as many as you like, on any machine. Ctrl-C finishes what has begun; a killed worker's tasks go to others.

    \b
    swarmq worker my_agent:attempt --kind math --concurrency 32
    swarmq worker math=agents:solve code=agents:write --processes 4
    swarmq worker my_agent:attempt --attempt-timeout 900        a function that hangs fails its episode, and is tried again
    """
    from swarmq import AsyncSwarmClient
    from swarmq.client.attempts import ATTEMPT_TIMEOUT_S
    from swarmq.client.fleet import Plan, parse_targets, run_processes, run_workers
    from swarmq.client.invites import find_invite

    plan = Plan(
        concurrency=concurrency,
        max_attempts=max_attempts,
        attempt_timeout_s=attempt_timeout or ATTEMPT_TIMEOUT_S,
    )
    wanted = parse_targets(targets, kinds)
    if processes > 1:
        run_processes(find_invite(invite), wanted, processes, plan)
        return
    for kind, summary in run_workers(AsyncSwarmClient(invite), wanted, plan).items():
        click.echo(f"{kind}: {summary}")


@main.command()
@RUN
@click.argument("episode", required=False)
@click.option("--step", type=click.IntRange(min=1), help="List the episodes of this step, and what was dropped for it.")
@click.option("--policy", help="Which policy's batch log; needed when the run trains several.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: batches or episodes, one a line, or the episode.")
@click.option(
    "--html", type=click.Path(path_type=Path), help="Write the episode to this file, one self-contained page."
)
def inspect(
    run: Path, episode: str | None, step: int | None, policy: str | None, *, as_json: bool, html: Path | None
) -> None:
    """List the batches of a run or the episodes of a step, or show every token of one EPISODE.

    An EPISODE is named by its id, or by the beginning or the end of it; ids of episodes of the same minute begin alike.
    A token is shown with its id, whether it is trained, its log-probability under the weights that sampled it and under
    those that trained it, its advantage and weight version, coloured by what it contributed to the step.

    \b
    swarmq inspect runs/demo
    swarmq inspect runs/demo --step 4
    swarmq inspect runs/demo 5d0c19e7
    swarmq inspect runs/demo 5d0c19e7 --html episode.html
    """
    need("learner")
    if html and episode is None:
        raise ConfigError("--html: say which EPISODE; `swarmq inspect RUN --step N` lists those of a step")
    if step is not None and episode is not None:
        raise ConfigError("--step lists the episodes of a step: leave it out to show one EPISODE")
    import msgspec
    from rich.console import Console

    from swarmq.observe.inspect import decoder_of, find_episode, read_batches, read_step
    from swarmq.observe.inspect_draw import draw_batches, draw_episode, draw_step, show
    from swarmq.observe.inspect_html import page

    job = _resolved(run)
    chosen = _one_policy(job, policy)
    log = RunFolder(run).batch_log(chosen)
    if episode is None:
        rows: Sequence[msgspec.Struct]
        if step is None:
            rows = batches = list(read_batches(log))
            drawn = draw_batches(batches)
        else:
            rows = episodes = read_step(log, step)
            drawn = draw_step(episodes)
        if as_json:
            for row in rows:
                click.echo(msgspec.json.encode(row))
        else:
            show(Console(), drawn)
        return
    view = find_episode(RunFolder(run), chosen, episode, decoder_of(job.policies[chosen].model))
    if html:
        html.write_text(page(view), encoding="utf-8")
    if as_json:
        click.echo(msgspec.json.encode(view))
    elif not html:
        show(Console(), draw_episode(view))


@main.group()
def engine() -> None:
    """See, add and remove the engines of a run that is up (docs/proxy.md).

    \b
    swarmq engine list runs/demo
    swarmq engine start runs/demo --policy main     one more vLLM, here, until Ctrl-C
    swarmq engine add runs/demo http://127.0.0.1:8007 --policy main
    """


POLICY = click.option("--policy", help="Whose engine; needed when the run has several policies.")


@engine.command("list")
@RUN
def engine_list(run: Path) -> None:
    """List the engines of every policy, and how they are.

    \b
    swarmq engine list runs/demo
    """
    from rich.console import Console
    from rich.table import Table

    from swarmq.engine.join import look

    table = Table("policy", "engine", "weights", "state", box=None)
    for seen in asyncio.run(look(_resolved(run))):
        table.add_row(seen.policy, seen.url, seen.weights, seen.state)
    Console().print(table)


@engine.command("add")
@RUN
@click.argument("url")
@POLICY
def engine_add(run: Path, url: str, policy: str | None) -> None:
    """Let a vLLM that runs at URL serve a policy; proxies and learner find it within seconds.

    \b
    swarmq engine add runs/demo http://127.0.0.1:8007
    """
    from swarmq.engine.join import add

    job = _resolved(run)
    asyncio.run(add(job, chosen := _one_policy(job, policy, frozen_too=True), url))
    click.echo(f"{url} serves {chosen}")


@engine.command("remove")
@RUN
@click.argument("url")
@POLICY
def engine_remove(run: Path, url: str, policy: str | None) -> None:
    """Give an engine nothing new; what is open there ends there.

    \b
    swarmq engine remove runs/demo http://127.0.0.1:8007
    """
    from swarmq.engine.join import remove

    job = _resolved(run)
    remove(job, chosen := _one_policy(job, policy, frozen_too=True), url)
    click.echo(f"{url} serves {chosen} no more; stop it when nothing is open there")


@engine.command("start")
@RUN
@POLICY
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free one by default.")
@click.option("--gpu", "gpus", type=int, multiple=True, help="A GPU it may use; may be repeated. All by default.")
def engine_start(run: Path, policy: str | None, port: int, gpus: tuple[int, ...]) -> None:
    """Start one more vLLM of a policy on this host; it serves until Ctrl-C, which drains it first.

    \b
    swarmq engine start runs/demo --policy main
    """
    from swarmq.engine.join import serve

    job = _resolved(run)
    run_until_signalled(
        serve(job, _one_policy(job, policy, frozen_too=True), port=port, gpus=gpus or None, report=click.echo)
    )


@main.command("invite")
@JOB
@SETS
@click.option(
    "--amqp",
    envvar="SWARMQ_CLIENTS_AMQP_URL",
    metavar="URL",
    help="Where clients find RabbitMQ, with user and password, if not where this command does.",
)
@click.option(
    "--proxy", envvar="SWARMQ_CLIENTS_PROXY_URL", metavar="URL", help="Where clients find the proxy; ends in /v1."
)
def invite_command(job: Path, sets: tuple[str, ...], amqp: str | None, proxy: str | None) -> None:
    """Open the run folder of a run whose parts are started one by one, and print the host's invite.

    `swarmq up` does this by itself. Afterwards every other command finds the run by its folder: feed, status, set,
    client add, ...

    \b
    swarmq invite job.toml --set broker.url=amqp://user:password@host:5672/ --proxy http://host:8000/v1
    docker compose run --rm swarmq invite /etc/swarmq/job.toml --set folder=/runs
    """
    from swarmq.client.invitations import invite_host

    with private_files():
        made = invite_host(SwarmJob.load(job, sets=sets), amqp=amqp, proxy=proxy)
    click.echo(f"export SWARMQ_INVITE={made.encode()}")


@main.group()
def client() -> None:
    """Invite clients to a run, list them, remove them (docs/access.md).

    \b
    swarmq client add alice                         one line for alice to paste
    swarmq client list
    swarmq client remove alice
    """


RUN_OPTION = click.option(
    "--run", "run", type=click.Path(path_type=Path), help="The run's folder; the only one in runs/ by default."
)
MANAGEMENT = click.option(
    "--management",
    envvar="SWARMQ_MANAGEMENT_URL",
    metavar="URL",
    help="RabbitMQ's management API, http(s)://user:password@host:15672; found by itself on the private node.",
)


@client.command("add")
@click.argument("name")
@RUN_OPTION
@MANAGEMENT
@click.option("--amqp", metavar="URL", help="Where the client finds RabbitMQ, e.g. amqps://gpu.example.org:5671/")
@click.option("--proxy", metavar="URL", help="Where it finds the proxy, e.g. https://gpu.example.org/v1")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM certificate that vouches for both, if self-signed.")
@click.option("--http", is_flag=True, help="Through the proxy alone, for networks that pass nothing else.")
@click.option("--max-connections", type=click.IntRange(min=2), help="To RabbitMQ, on all machines together.")
def client_add(
    name: str,
    run: Path | None,
    management: str | None,
    amqp: str | None,
    proxy: str | None,
    ca: Path | None,
    http: bool,
    max_connections: int | None,
) -> None:
    """Invite a client: prints the line it starts from. It may run episodes, and nothing else.

    \b
    swarmq client add alice
    swarmq client add alice --amqp amqps://gpu.example.org:5671/ --proxy https://gpu.example.org/v1 --ca ca.pem
    swarmq client add bob --http --proxy https://gpu.example.org/v1
    """
    from swarmq.broker.access import MAX_CONNECTIONS
    from swarmq.client.invitations import Reach, add_client
    from swarmq.client.invites import find_invite

    folder = _only_run(run)
    invite = add_client(
        RunFolder(folder),
        find_invite(folder),
        name,
        _management(folder, management),
        Reach(amqp=amqp, proxy=proxy, ca=ca, http=http),
        max_connections=max_connections or MAX_CONNECTIONS,
    )
    click.echo(f"export SWARMQ_INVITE={invite.encode()}")


@client.command("list")
@RUN_OPTION
def client_list(run: Path | None) -> None:
    """List who was invited, and who was removed.

    \b
    swarmq client list --run runs/demo
    """
    from rich.console import Console
    from rich.table import Table

    from swarmq.members import read_members

    table = Table("client", "added", "removed", "reaches", box=None)
    for one in read_members(RunFolder(_only_run(run)).clients).values():
        by = "RabbitMQ" if one.broker_user else "HTTP"
        table.add_row(one.name, _day(one.added_at), _day(one.removed_at), by)
    Console().print(table if table.rows else "nobody was invited")


@client.command("remove")
@click.argument("name")
@RUN_OPTION
@MANAGEMENT
def client_remove(name: str, run: Path | None, management: str | None) -> None:
    """Remove a client: its connections are closed, its keys refused. What it ended before is still trained.

    \b
    swarmq client remove alice
    """
    from swarmq.client.invitations import remove_client

    folder = _only_run(run)
    remove_client(RunFolder(folder), name, _management(folder, management))
    click.echo(f"{name} is removed")


def _only_run(run: Path | None) -> Path:
    """The folder of the run that is meant. Raises ConfigError when that is not clear."""
    if run is not None:
        return run
    found = [path.parent for path in Path("runs").glob("*/resolved.toml")]
    if len(found) != 1:
        names = ", ".join(sorted(path.name for path in found))
        raise ConfigError(
            f"--run: say which run; in {Path('runs').absolute()} there {f'are {names}' if names else 'is none'}"
        )
    return found[0]


def _management(run: Path, url: str | None) -> Any:
    """The management API of the run's broker: the one named, the private node's, or the usual port of its host."""
    from swarmq.broker.access import Management
    from swarmq.broker.node_files import HOST, read_identity

    amqp_url = _resolved(run).broker.url or ""
    if url is None and (node := read_identity(RunFolder(run).broker)):
        url = f"http://{node.user}:{node.password}@{HOST}:{node.management_port}/"
    return Management.of(amqp_url, url)


def _day(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else ""


@main.group()
def dead() -> None:
    """Look after messages that nobody could use: list, show, requeue, purge (docs/swarm.md).

    \b
    swarmq dead list runs/demo                who sent what, and why it was refused
    swarmq dead show runs/demo ID
    swarmq dead requeue runs/demo ID          once the cause is mended
    swarmq dead purge runs/demo ID
    """


@dead.command("list")
@RUN
def dead_list(run: Path) -> None:
    """List dead letters with the reason each was refused. Looking changes nothing.

    \b
    swarmq dead list runs/demo
    """
    run_until_signalled(_dead_list(_resolved(run)))


async def _dead_list(job: SwarmJob) -> None:
    from rich.console import Console
    from rich.table import Table

    from swarmq.broker.dead import letters

    table = Table("kind", "queue", "key", "reason", box=None)
    table.add_column("id", no_wrap=True)
    found = await letters(job.broker.url or "")
    for letter in found:
        table.add_row(letter.kind, letter.queue, letter.key, letter.reason, letter.id)
    Console().print(table if found else "no dead letters")


@dead.command("show")
@RUN
@click.argument("id")
def dead_show(run: Path, id: str) -> None:  # noqa: A002 - the word people type
    """Print one dead letter: where it was meant for, why it was refused, what is in it.

    \b
    swarmq dead show runs/demo 01a1fa68c1d27c0e
    """
    run_until_signalled(_dead_show(_resolved(run), id))


async def _dead_show(job: SwarmJob, wanted: str) -> None:
    from swarmq.broker.dead import letters, show

    for letter in await letters(job.broker.url or ""):
        if letter.id == wanted:
            click.echo(show(letter))
            return
    raise BrokerError(f"no dead letter has the id {wanted!r}: `swarmq dead list` shows them")


@dead.command("requeue")
@RUN
@click.argument("ids", nargs=-1)
def dead_requeue(run: Path, ids: tuple[str, ...]) -> None:
    """Send dead letters back to the queues they were meant for; all of them without IDS.

    \b
    swarmq dead requeue runs/demo 01a1fa68c1d27c0e
    swarmq dead requeue runs/demo
    """
    run_until_signalled(_dead_requeue(_resolved(run), ids))


async def _dead_requeue(job: SwarmJob, ids: tuple[str, ...]) -> None:
    from swarmq.broker.dead import requeue

    done = await requeue(job.broker.url or "", ids or None)
    click.echo(f"{done.sent} sent back")
    for letter, reason in done.left.items():
        click.echo(f"{letter} stays: {reason}")


@dead.command("purge")
@RUN
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Forget every dead letter.")
def dead_purge(run: Path, ids: tuple[str, ...], everything: bool) -> None:
    """Forget dead letters for good: the IDS given, or --all.

    \b
    swarmq dead purge runs/demo 01a1fa68c1d27c0e
    swarmq dead purge runs/demo --all
    """
    if not ids and not everything:
        raise ConfigError("say which dead letters to forget, by id, or --all")
    run_until_signalled(_dead_purge(_resolved(run), None if everything else ids))


async def _dead_purge(job: SwarmJob, ids: tuple[str, ...] | None) -> None:
    from swarmq.broker.dead import purge

    click.echo(f"{await purge(job.broker.url or '', ids)} forgotten")


@main.command()
@RUN
@click.argument("to", type=click.Path(path_type=Path))
@click.option("--policy", help="Which policy; needed when the run trains several.")
@click.option(
    "--from", "start", type=click.Path(path_type=Path), help="A checkpoint folder; the initial model without."
)
@click.option("--until", type=click.IntRange(min=0), help="Stop at this weight version.")
def replay(run: Path, to: Path, policy: str | None, start: Path | None, until: int | None) -> None:
    """Train again from the batch log alone and write the checkpoint into the new folder TO.

    Needs no broker and no engine, and changes nothing in the run folder.

    \b
    swarmq replay runs/demo /tmp/again                        from the initial model to the end of the log
    swarmq replay runs/demo /tmp/again --from runs/demo/main/checkpoints/step-00000010
    swarmq replay runs/team /tmp/again --policy planner --until 40
    """
    need("learner")
    from swarmq.learner.replay import replay as train_again

    job = _resolved(run)
    version = train_again(
        job,
        _one_policy(job, policy),
        to_folder=to,
        from_checkpoint=start,
        until=until,
        report=lambda step: click.echo(f"step {step['version']}  loss {step['loss']:.6f}"),
    )
    click.echo(f"version {version} written to {to}")


@main.command()
@RUN
@click.option("--policy", help="Which policy; needed when the run trains several.")
@click.option(
    "--batches", default=3, show_default=True, type=click.IntRange(min=1), help="How many stored batches to replay."
)
@click.option(
    "--device", type=click.Choice(["cpu"]), help="Replay there, in FP32, beside engines and a learner that are up."
)
def doctor(run: Path, policy: str | None, batches: int, device: str | None) -> None:
    """Examine a run: is what is trained what was sampled, and is the training alive?

    Names signs of collapse, holds stored batches against the rules that come before any formula, replays them through
    the learner from a checkpoint, and says where and why engine and learner disagree. Changes nothing; status 1 when
    something is wrong or could not be examined.

    \b
    swarmq doctor runs/demo
    swarmq doctor runs/team --policy planner --batches 4
    swarmq doctor runs/demo --device cpu
    """
    need("learner")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, so that nothing of it takes a GPU
    from swarmq.learner.doctor.examine import examine
    from swarmq.learner.doctor.signs import signs
    from swarmq.observe.curves import read_events

    job = _resolved(run)
    name = _one_policy(job, policy)
    steps: dict[int, dict[str, Any]] = {}
    if job.run_folder.events.exists():
        events = (e for e in read_events(job.run_folder.events) if (e.name, e.source) == ("step", f"learner.{name}"))
        steps = {int(event.fields["version"]): event.fields for event in events}
    wrong = False
    colors = {"ok": "green", "note": "blue", "warning": "yellow", "error": "red"}
    found = signs([fields for _, fields in sorted(steps.items())], job.groups.max_staleness)
    for finding in itertools.chain(found, examine(job, name, batches=batches)):
        wrong |= finding.level == "error"
        click.echo(click.style(f"{finding.level:8}", fg=colors[finding.level]) + f"{finding.check}: {finding.text}")
    sys.exit(int(wrong))


def _one_policy(job: SwarmJob, policy: str | None, *, frozen_too: bool = False) -> str:
    """The trained policy that is meant, or any. Raises ConfigError when that is not clear."""
    names = [name for name, one in job.policies.items() if one.trained or frozen_too]
    if policy is None and len(names) == 1:
        return names[0]
    if policy not in names:
        raise ConfigError(f"--policy: say which of {', '.join(names)}")
    return policy


@main.command()
@RUN
@click.option(
    "--role",
    "roles",
    type=click.Choice(get_args(Role)),
    multiple=True,
    help="rollout: begin and end episodes; read: status, episodes, metrics; admin: all, and engines.",
)
@click.option("--name", default="operator", show_default=True, help="Who it is for; episodes begun with it say so.")
@click.option(
    "--days", default=30.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="How long it is valid."
)
@click.option("--revoke", is_flag=True, help="Refuse all tokens of this name from now on, for good.")
def token(run: Path, roles: tuple[Role, ...], name: str, days: float, *, revoke: bool) -> None:
    """Print an operator token for the proxy's control routes (docs/control.md), or revoke those of a name.

    \b
    swarmq token runs/demo --role rollout --name java-agents
    curl -H "Authorization: Bearer $(swarmq token runs/demo --role read)" $PROXY/v1/control/status
    swarmq token runs/demo --revoke --name java-agents
    """
    from swarmq.members import Members, read_members

    job, folder = _resolved(run), RunFolder(run)
    member = keys.operator_member(name)
    if revoke == bool(roles):
        raise ConfigError("--role: say what the token is for; or --revoke, without roles")
    if revoke:
        with Members.open(folder.clients) as members:
            members.remove(member, now=time.time())
        click.echo(f"the tokens of {name} are refused from now on")
        return
    if member in read_members(folder.clients):
        raise ConfigError(f"--name: the tokens of {name!r} were revoked, and stay so: choose another name")
    root = keys.load_root(folder.root_secret)
    made = keys.Operator(run=job.run, name=name, roles=roles, expires_at=time.time() + days * 86_400)
    click.echo(keys.mint_operator(keys.operator_secret(root, name), made))


@main.command()
@RUN
@click.option("--name", default="viewer", show_default=True, help="Who it is for.")
@click.option("--remove", "gone", is_flag=True, help="Delete the login of this name.")
@MANAGEMENT
def viewer(run: Path, name: str, management: str | None, *, gone: bool) -> None:
    """Print a login for RabbitMQ's management UI that sees how full queues are, and no message.

    \b
    swarmq viewer runs/demo
    swarmq viewer runs/demo --name carol
    swarmq viewer runs/demo --name carol --remove
    """
    import secrets

    job, api = _resolved(run), _management(run, management)
    user = f"{job.run}.viewer.{name}"
    if gone:
        api.remove(user)
        click.echo(f"{user} is removed")
        return
    api.add_viewer(user, password := secrets.token_urlsafe(18))
    click.echo(f"{api.url}  user {user}  password {password}")


@main.command("warm")
@JOB
@click.argument("demonstrations", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--policy", help="Whose model; needed when the job trains several.")
@click.option(
    "--epochs", default=1, show_default=True, type=click.IntRange(1), help="Times through the demonstrations."
)
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Demonstrations of one step.")
@SETS
def warm_command(
    job: Path, demonstrations: Path, out: Path, policy: str | None, epochs: int, batch: int, sets: tuple[str, ...]
) -> None:
    """Supervised warm start: teach the job's model a format from chats, before rewards say what pays.

    DEMONSTRATIONS has a JSON object with "messages" (and "tools") on every line; what the assistant says is learned. OUT
    becomes a model folder for policies.X.model. Learning rate, precision and the rest are those of policies.X.train.

    \b
    swarmq warm job.toml chats.jsonl models/warm --epochs 2
    """
    need("learner")
    from swarmq.learner.warm import Progress, WarmStart, warm

    settings = SwarmJob.load(job, sets=sets)
    name = _one_policy(settings, policy)

    def show(now: Progress) -> None:
        left_out = f", {now.left_out} demonstrations are too long" if now.left_out and now.step == 1 else ""
        click.echo(f"step {now.step} of {now.steps}, loss {now.loss:.3f}{left_out}")

    plan = WarmStart(
        model=settings.policies[name].model,
        demonstrations=demonstrations,
        out=out,
        train=settings.train_of(name),
        epochs=epochs,
        batch=batch,
    )
    warm(plan, show)
    click.echo(f"{out}: set policies.{name}.model to it")


def _daemon(name: str, help_text: str) -> Callable[[Callable[..., None]], click.Command]:
    def wrap(function: Callable[..., None]) -> click.Command:
        command = click.command(name, help=help_text, context_settings={"help_option_names": ["-h", "--help"]})
        return command(JOB(SETS(private_files()(function))))

    return wrap


@_daemon(
    "proxy",
    "Serve agents: an OpenAI-compatible proxy in front of the job's engines that records every sampled token.\n\n"
    "JOB is a job file with broker.url and policies.X.engine.urls set; `swarmq up` writes one as resolved.toml.\n\n"
    "\b\n"
    "swarmq-proxy runs/math/resolved.toml\n"
    "swarmq-proxy runs/math/resolved.toml --port 8001 --number 1   the second of two (proxy.count = 2)",
)
@click.option("--port", type=click.IntRange(0, 65535), help="Override proxy.port, e.g. for a second proxy.")
@click.option(
    "--number", default=0, show_default=True, type=click.IntRange(min=0), help="Its own among proxy.count proxies."
)
@click.option(
    "--join", is_flag=True, help="Beside the proxies of a run that is up, until Ctrl-C; on a free port without --port."
)
def proxy_command(job: Path, sets: tuple[str, ...], port: int | None, number: int, *, join: bool) -> None:
    need("proxy")
    from swarmq.proxy.main import run

    chosen = 0 if join and port is None else port
    run(
        SwarmJob.load(job, sets=[*sets, *([] if chosen is None else [f"proxy.port={chosen}"])]),
        number=number,
        join=join,
    )


@_daemon(
    "learner",
    "Train one policy of a job from its ready queue, and push the weights to its engines.\n\n"
    "\b\n"
    "swarmq-learner runs/math/resolved.toml\n"
    "swarmq-learner runs/math/resolved.toml --policy main --num-gpus 4 --no-collector",
)
@click.option("--policy", help="Which policy; needed when the job trains several.")
@click.option("--num-gpus", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks to start.")
@click.option("--collector/--no-collector", default=True, help="Run the collector beside this learner.")
def learner_command(job: Path, sets: tuple[str, ...], policy: str | None, num_gpus: int, collector: bool) -> None:
    need("learner")
    from swarmq.learner.main import run

    settings = SwarmJob.load(job, sets=sets)
    run(settings, _one_policy(settings, policy), num_gpus=num_gpus, with_collector=collector)


@_daemon(
    "collector",
    "Join turns and outcomes into episodes and groups, and issue tickets.\n\n"
    "\b\n"
    "swarmq-collector runs/math/resolved.toml",
)
def collector_command(job: Path, sets: tuple[str, ...]) -> None:
    from swarmq.collector.main import run

    run(SwarmJob.load(job, sets=sets))


for _command in (proxy_command, learner_command, collector_command):
    main.add_command(_command)


def proxy() -> None:
    """Entry point of `swarmq-proxy`."""
    with friendly():
        proxy_command()


def learner() -> None:
    """Entry point of `swarmq-learner`."""
    with friendly():
        learner_command()


def collector() -> None:
    """Entry point of `swarmq-collector`."""
    with friendly():
        collector_command()
