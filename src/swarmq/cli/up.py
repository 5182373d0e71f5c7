"""`swarmq demo` and `swarmq up`: a whole run on this host, until it is done or Ctrl-C."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmq.broker import Broker
from swarmq.cli.all_settings import all_settings
from swarmq.cli.common import HOST, JOB, SETS, main, private_files, require_extras, run_until_signalled, terminal_width
from swarmq.config import SwarmJob

if TYPE_CHECKING:
    from swarmq.up import Deployment


@main.command()
@click.option("--run", default="demo", show_default=True, help="Name of the run; a number is appended if it exists.")
@click.option("--folder", default="runs", show_default=True, help="Parent folder of run folders.")
@click.option("--seed", default=0, show_default=True, help="Seed of sampling, tasks and training.")
@click.option("--model", help="A Hugging Face model folder or name to train instead of the demo's own small model.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps; fewer make a shorter demo.")
@click.option("--plain", is_flag=True, help="Print lines instead of a live display.")
@SETS
def demo(
    run: str, folder: str, seed: int, model: str | None, steps: int | None, plain: bool, sets: tuple[str, ...]
) -> None:
    """Train a real agent on this machine: no GPU, ten minutes.

    \b
    swarmq demo                       the whole demo, with a client killed half-way
    swarmq demo --seed 1 --steps 20   shorter, another seed
    swarmq demo --model Qwen/Qwen3-0.6B --set policies.main.train.learning_rate=1e-6
    """
    require_extras(*HOST, "demo")
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
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes of the private RabbitMQ; sets broker.nodes.")
@click.option("--show", is_flag=True, help="Print every setting as TOML, unset ones as comments, and exit.")
@click.option("--until-done", is_flag=True, help="Stop when every learner has made its last step, as for batch jobs.")
def up(job: Path, sets: tuple[str, ...], nodes: int | None, show: bool, until_done: bool) -> None:
    """Start every process of a job on this host.

    Starts RabbitMQ (unless broker.url or $SWARMQ_AMQP_URL names one), vLLM, the proxies, the collector and a learner for each
    trained policy, and keeps them running until Ctrl-C. Prints how clients join, and no password.

    \b
    swarmq up job.toml
    swarmq up job.toml --set policies.main.train.learning_rate=1e-5 --set run=second
    swarmq up job.toml --nodes 3      a RabbitMQ cluster on this host, to try it out
    """
    settings = SwarmJob.load(job, sets=(*sets, *([f"broker.nodes={nodes}"] if nodes else [])))
    if show:
        click.echo(all_settings(settings), nl=False)
        return
    own_engines = any(not policy.engine.urls for policy in settings.policies.values())
    require_extras(*(extra for extra in HOST if own_engines or extra != "vllm"))
    with private_files():
        run_until_signalled(_up(settings, until_done=until_done))


async def _up(job: SwarmJob, *, until_done: bool) -> None:
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.observe.lines import format_elapsed, wrap_beside
    from swarmq.observe.recorder import record_run
    from swarmq.observe.step_lines import follow_steps
    from swarmq.runtime.logs import redirect_to
    from swarmq.up import deploy
    from swarmq.up.shutdown import describe_stopped_run

    began = time.monotonic()

    def report(text: str) -> None:
        click.echo(wrap_beside(format_elapsed(began), text, width=terminal_width()))

    with redirect_to(report):
        try:
            async with (
                deploy(job, report=report) as deployment,
                AmqpBroker.open(deployment.invite.amqp_url, name="swarmq up events", deadline_s=None) as broker,
                record_run(deployment.job, broker),
            ):
                for line in deployment.welcome():
                    report(line)
                async with asyncio.TaskGroup() as tasks:
                    reports = [
                        tasks.create_task(_report_pace(deployment.job, broker, report)),
                        tasks.create_task(_report_learner_ends(deployment, report)),
                        tasks.create_task(follow_steps(deployment.job, broker, report)),
                    ]
                    if until_done:
                        await deployment.learners_done.wait()
                        for one in reports:
                            one.cancel()
            report(describe_stopped_run(job))
        except asyncio.CancelledError:
            report(describe_stopped_run(job))
            raise


async def _report_learner_ends(deployment: Deployment, report: Callable[[str], None]) -> None:
    from swarmq.up.shutdown import describe_ended_policies, read_last_step

    job = deployment.job
    while True:
        await deployment.learners_done.wait()
        report("every learner has made its last step; engines and proxy stay up until Ctrl-C")
        for line in describe_ended_policies(
            job, {policy: read_last_step(job, policy) for policy in job.trained}
        ).values():
            report(line)
        await deployment.learning.wait()
        report("learners are started again")


async def _report_pace(job: SwarmJob, broker: Broker, report: Callable[[str], None]) -> None:
    """Report pauses, drains and resumptions, beginning with the state in which the run was left."""
    from swarmq.observe.monitor import follow_pace

    async for pace in follow_pace(job, broker):
        hint = "" if pace == "running" else f"; to continue: `swarmq resume {job.run_folder.path}`"
        report(f"the run is {pace}{hint}")
