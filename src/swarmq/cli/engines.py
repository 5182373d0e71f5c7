"""`swarmq engine`: the engines of a run that is up, and single engines of a job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from swarmq.cli.common import (
    JOB,
    RUN,
    SETS,
    choose_policy,
    load_live_run,
    load_stored_run,
    main,
    print_table,
    private_files,
    require_extras,
    run_until_signalled,
)
from swarmq.cli.hosts import CERTIFICATE, KEY, URL, make_place, read_host_invite
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.registries.engines import EngineRegistry


@main.group()
def engine() -> None:
    """List, add and remove the engines of a run. See docs/explanation/proxy.md.

    \b
    swarmq engine list runs/demo
    swarmq engine start runs/demo --policy main     one more vLLM, here, until Ctrl-C
    swarmq engine add runs/demo http://127.0.0.1:8007 --policy main
    swarmq engine secret runs/demo                  the secret that engines require
    """


POLICY = click.option("--policy", help="Policy of the engine; required if the run has several policies.")


def _engines_of(run: Path, policy: str | None) -> tuple[EngineRegistry, str]:
    """Return the engine registry of a run that is up, and the chosen policy."""
    job = load_live_run(run)
    return EngineRegistry(job, RunFolder(run)), choose_policy(job, policy, frozen_too=True)


@engine.command("list")
@RUN
def engine_list(run: Path) -> None:
    """List the engines of every policy with their state.

    \b
    swarmq engine list runs/demo
    """
    from swarmq.engine.server.membership import list_engines

    listed = asyncio.run(list_engines(EngineRegistry(load_live_run(run), RunFolder(run))))
    rows = [(one.policy, one.url, one.weights, one.state) for one in listed]
    print_table(("policy", "engine", "weights", "state"), rows, when_empty="the run has no engine")


@engine.command("add")
@RUN
@click.argument("url")
@POLICY
def engine_add(run: Path, url: str, policy: str | None) -> None:
    """Add a running vLLM server to the engines of a policy.

    Proxies and learner use it within seconds.

    \b
    swarmq engine add runs/demo http://127.0.0.1:8007
    """
    from swarmq.engine.server.membership import add_engine

    roster, chosen = _engines_of(run, policy)
    warning = asyncio.run(add_engine(roster, chosen, url))
    click.echo(f"{url} serves {chosen}")
    if warning:
        click.secho(f"warning: {warning}", fg="yellow", err=True)


@engine.command("secret")
@RUN
def engine_secret(run: Path) -> None:
    """Print the secret that the engines of a run require of every caller.

    A vLLM that you start yourself requires it, too, if it is set as $SWARMQ_ENGINE_SECRET and vLLM runs with
    `--middleware swarmq.weights.vllm_plugin.middleware.SecretMiddleware`.

    \b
    swarmq engine secret runs/demo
    """
    click.echo(EngineRegistry(load_stored_run(run), RunFolder(run)).secret())


@engine.command("remove")
@RUN
@click.argument("url")
@POLICY
def engine_remove(run: Path, url: str, policy: str | None) -> None:
    """Remove an engine: it gets no new calls and finishes its open ones.

    \b
    swarmq engine remove runs/demo http://127.0.0.1:8007
    """
    from swarmq.engine.server.membership import remove_engine

    roster, chosen = _engines_of(run, policy)
    remove_engine(roster, chosen, url)
    click.echo(f"{url} gets no new calls of {chosen}; stop it when its open calls are finished")


GPUS = click.option(
    "--gpu", "gpus", type=int, multiple=True, help="GPU that the engine may use; may be repeated; all by default."
)


@engine.command("start")
@click.argument("run", type=click.Path(path_type=Path), required=False)
@POLICY
@click.option(
    "--join",
    metavar="INVITE",
    help="Start it on another host than the run's: an invite of `swarmq host add`, or a file that holds it.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Address to listen on and to announce; by default 127.0.0.1, with an invite the address from which RabbitMQ is reached.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65534),
    default=0,
    help="Port; a free one by default. With an invite the next port is that of its weight receiver.",
)
@URL
@CERTIFICATE
@KEY
@GPUS
def engine_start(
    run: Path | None,
    policy: str | None,
    join: str | None,
    host: str | None,
    port: int,
    url: str | None,
    certificate: Path | None,
    key: Path | None,
    gpus: tuple[int, ...],
) -> None:
    """Start one more vLLM of a policy on this host.

    The engine serves until Ctrl-C, and finishes its open calls first.

    \b
    swarmq engine start runs/demo --policy main
    swarmq engine start runs/demo --host 10.0.0.1              an engine that proxies on other hosts reach, too
    swarmq engine start --join gpu2.invite --policy main       on another host
    """
    if (run is None) == (join is None):
        raise click.UsageError("Name a RUN, or an invite with --join.")
    from swarmq.engine.server.membership import serve_engine_elsewhere, serve_extra_engine

    if join is not None:
        serving = serve_engine_elsewhere(
            read_host_invite(join),
            make_place(host, port, url, certificate, key),
            choose=lambda job: choose_policy(job, policy, frozen_too=True),
            gpus=gpus or None,
            report=click.echo,
        )
    else:
        assert run is not None
        if url or certificate or key:
            raise ConfigError("--url, --certificate and --key go with an invite (--join)")
        job, folder = load_live_run(run), RunFolder(run)
        serving = serve_extra_engine(
            job,
            choose_policy(job, policy, frozen_too=True),
            folder,
            host=host or "127.0.0.1",
            port=port,
            gpus=gpus or None,
            report=click.echo,
        )
    run_until_signalled(serving)


@engine.command("serve")
@JOB
@SETS
@POLICY
@click.option(
    "--number",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of this engine among the policy's engine.urls.",
)
@GPUS
def engine_serve(job: Path, sets: tuple[str, ...], policy: str | None, number: int, gpus: tuple[int, ...]) -> None:
    """Start a vLLM that a job names.

    For runs whose processes are started one by one. vLLM listens at the address of policies.POLICY.engine.urls[NUMBER] and
    requires the run's secret of every caller. Ends with Ctrl-C, or with an error when vLLM ends.

    \b
    swarmq engine serve job.toml --set 'policies.main.engine.urls=["http://gpu1:8100"]'
    """
    from swarmq.engine.server.membership import serve_named_engine

    require_extras("vllm")
    settings = SwarmJob.load(job, sets=sets)
    chosen = choose_policy(settings, policy, frozen_too=True)
    with private_files():
        run_until_signalled(serve_named_engine(settings, chosen, number=number, gpus=gpus or None, report=click.echo))
