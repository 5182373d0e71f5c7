"""`swarmq proxy`, `swarmq learner` and `swarmq collector`: single processes of a job, for hosts where they are started one by
one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import click

from swarmq.cli.common import (
    HELP_OPTIONS,
    JOB,
    SETS,
    choose_policy,
    main,
    private_files,
    require_extras,
)
from swarmq.cli.hosts import CERTIFICATE, KEY, URL, make_place, read_host_invite
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.hosts.addresses import ListenAddress


def _daemon(name: str, help_text: str) -> Callable[[Callable[..., None]], click.Command]:
    def wrap(function: Callable[..., None]) -> click.Command:
        command = click.command(name, help=help_text, context_settings=HELP_OPTIONS)
        return command(JOB(SETS(private_files()(function))))

    return wrap


@click.command("proxy", context_settings=HELP_OPTIONS)
@click.argument("job", type=click.Path(path_type=Path), required=False)
@SETS
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Override proxy.port, e.g. for a second proxy; a free one when joining.",
)
@click.option(
    "--number",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of this proxy among the proxy.count proxies.",
)
@click.option(
    "--join",
    is_flag=False,
    flag_value="",
    metavar="[INVITE]",
    help="Add a proxy to a run that is up, until Ctrl-C: on the run's own host with JOB, on another host with an invite of `swarmq host "
    "add` or a file that holds it.",
)
@click.option("--host", metavar="ADDRESS", help="With an invite: address to listen on and to announce.")
@URL
@CERTIFICATE
@KEY
@private_files()
def proxy_command(
    job: Path | None,
    sets: tuple[str, ...],
    port: int | None,
    number: int,
    join: str | None,
    host: str | None,
    url: str | None,
    certificate: Path | None,
    key: Path | None,
) -> None:
    """Serve agents, and record every sampled token.

    An OpenAI-compatible proxy in front of the job's engines. JOB is a job file with broker.url and policies.X.engine.urls set;
    `swarmq up` writes one as resolved.toml.

    \b
    swarmq proxy runs/math/resolved.toml
    swarmq proxy runs/math/resolved.toml --port 8001 --number 1   the second of two (proxy.count = 2)
    swarmq proxy runs/math/resolved.toml --join                   one more, while the run is up
    swarmq proxy --join gpu2.invite                               one more, on another host
    """
    require_extras("proxy")
    if join and job is None and Path(join).suffix == ".toml":
        job, join = Path(join), ""  # `--join JOB`
    if join:
        _join_by_invite(join, job, sets, number, make_place(host, port, url, certificate, key))
        return
    if job is None:
        raise click.UsageError("Missing argument 'JOB', or --join INVITE.")
    if only := [
        name for name, value in {"host": host, "url": url, "certificate": certificate, "key": key}.items() if value
    ]:
        raise ConfigError(
            f"--{only[0]} goes with an invite (--join INVITE); with a job, set proxy.host, proxy.certificate and proxy.key"
        )
    from swarmq.dashboard.behind_proxy import open_pages
    from swarmq.proxy.main import run

    is_joining = join is not None
    chosen = 0 if is_joining and port is None else port
    run(
        SwarmJob.load(job, sets=[*sets, *([] if chosen is None else [f"proxy.port={chosen}"])]),
        number=number,
        join=is_joining,
        pages=open_pages,
    )


def _join_by_invite(invite: str, job: Path | None, sets: tuple[str, ...], number: int, place: ListenAddress) -> None:
    if job is not None or sets or number:
        raise ConfigError(
            "--join INVITE takes the run's settings from its collector: leave out JOB, --set and --number"
        )
    from swarmq.proxy.main import run_elsewhere

    run_elsewhere(read_host_invite(invite), place)


@_daemon(
    "learner",
    "Train one policy of a job.\n\n"
    "Batches come from its ready queue, weights go to its engines.\n\n"
    "\b\n"
    "swarmq learner runs/math/resolved.toml\n"
    "swarmq learner runs/math/resolved.toml --policy main --num-gpus 4 --no-collector\n"
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr gpu0 --master-port 29500 -m swarmq learner runs/math/resolved.toml\n\n"
    "Under torchrun and accelerate launch every process is a rank. Only rank 0 needs JOB; other hosts get it from rank 0.",
)
@click.option("--policy", help="Policy to train; required if the job trains several.")
@click.option("--num-gpus", default=1, show_default=True, type=click.IntRange(min=1), help="Number of ranks to start.")
@click.option("--collector/--no-collector", default=True, help="Run the collector beside this learner.")
def learner_command(job: Path, sets: tuple[str, ...], policy: str | None, num_gpus: int, collector: bool) -> None:
    require_extras("learner")
    from swarmq.learner.distributed.processes import is_main, is_rank, run_ranks
    from swarmq.learner.main import run

    if is_rank() and not job.exists():
        if is_main():
            raise ConfigError(
                f"{job}: no such file on {socket.gethostname()}, where rank 0 runs: start rank 0 on the host of the run. torchrun numbers hosts by "
                "--node-rank with --master-addr and --master-port, but by their names with --rdzv-backend c10d"
            )
        run(None, None)
        return
    settings = SwarmJob.load(job, sets=sets)
    name = choose_policy(settings, policy)
    if num_gpus == 1 or is_rank():
        run(settings, name, with_collector=collector)
        return
    overrides = [argument for each in sets for argument in ("--set", each)]
    beside = "--collector" if collector else "--no-collector"
    run_ranks([sys.executable, "-m", "swarmq", "learner", str(job), "--policy", name, beside, *overrides], num_gpus)


@_daemon(
    "collector",
    "Join turns into episodes and groups, and issue tickets.\n\n\b\nswarmq collector runs/math/resolved.toml",
)
@click.option(
    "--take-over", is_flag=True, help="In a run with standbys: lead at once, and let the collector that leads stand by."
)
def collector_command(job: Path, sets: tuple[str, ...], *, take_over: bool) -> None:
    require_extras("collector")
    from swarmq.collector.main import run

    run(SwarmJob.load(job, sets=sets), take_over=take_over)


for _command in (proxy_command, learner_command, collector_command):
    main.add_command(_command)


def proxy() -> None:
    """Entry point of `swarmq-proxy`."""
    main(["proxy", *sys.argv[1:]], prog_name="swarmq")


def learner() -> None:
    """Entry point of `swarmq-learner`."""
    main(["learner", *sys.argv[1:]], prog_name="swarmq")


def collector() -> None:
    """Entry point of `swarmq-collector`."""
    main(["collector", *sys.argv[1:]], prog_name="swarmq")
