"""`swarmq record`: the recording of a run whose processes are started one by one; `swarmq up` and `swarmq demo` record by themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmq.cli.common import JOB, SETS, main, private_files, run_until_signalled
from swarmq.config import SwarmJob, make_folder, resolve_amqp_url
from swarmq.errors import ConfigError


@main.command()
@JOB
@SETS
def record(job: Path, sets: tuple[str, ...]) -> None:
    """Record a run whose processes are started one by one.

    Keeps board.json, samples.jsonl and events.jsonl in the run folder, which the dashboard reads, and sends the alerts of
    [alerts], until Ctrl-C. `swarmq up` and `swarmq demo` do this by themselves. JOB is a job file with broker.url set.

    \b
    swarmq record runs/math/resolved.toml
    swarmq record job.toml --set folder=/runs
    """
    settings = SwarmJob.load(job, sets=sets)
    with private_files():
        run_until_signalled(_record(settings))


async def _record(job: SwarmJob) -> None:
    from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s
    from swarmq.observe.alerts import check_alerts
    from swarmq.observe.recorder import record_run
    from swarmq.runtime import logs

    if (url := resolve_amqp_url(job.broker)) is None:
        raise ConfigError("broker.url: recording needs a RabbitMQ; set it, or $SWARMQ_AMQP_URL, or use `swarmq up`")
    check_alerts(job.alerts)
    logs.configure(role="recorder", run=job.run)
    make_folder(job.run_folder.path)
    async with (
        AmqpBroker.open(url, name=f"swarmq record {job.run}", deadline_s=initial_connect_timeout_s()) as broker,
        record_run(job, broker),
    ):
        logs.log.info("recording", folder=str(job.run_folder.path))
        await asyncio.Event().wait()
