"""Entry point of `swarmq-collector`, and of the child process that a learner starts. `service.py` shows the flow."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing

import structlog

from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob, make_folder, resolve_amqp_url
from swarmq.errors import ConfigError
from swarmq.runtime import logs

log = structlog.get_logger()


def run(job: SwarmJob) -> None:
    """Collect until SIGTERM or SIGINT, then finish the work in hand; a second signal ends the process at once.

    Raises ConfigError without a broker, BrokerError if the broker refuses the connection, CollectorError if the store is
    unusable.
    """
    logs.configure(role="collector", run=job.run)
    url = resolve_amqp_url(job.broker)
    if url is None:
        raise ConfigError("broker.url: the collector needs a RabbitMQ; set it, or $SWARMQ_AMQP_URL, or use `swarmq up`")
    make_folder(job.run_folder.path)
    asyncio.run(_collect(job, url))


async def _collect(job: SwarmJob, url: str) -> None:
    stop = _stop_on_signals()
    with closing(Store(job.run_folder.inbox, run=job.run)) as store:
        async with AmqpBroker.open(url, name=f"collector.{job.run}", deadline_s=initial_connect_timeout_s()) as broker:
            await Collector(job, broker, store).run(stop)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            os._exit(1)  # crash-safe: what is not committed comes again
        log.info("draining")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    return stop
