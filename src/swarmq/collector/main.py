"""Entry point of `swarmq-collector`, and of the child process that a learner starts. `service.py` shows the flow."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, contextmanager, nullcontext
from typing import Any

import structlog

from swarmq.broker import Broker, topology
from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s
from swarmq.collector.service import Collector
from swarmq.collector.standby import INTERVALS, StandbyIntervals, StandbyLog
from swarmq.collector.store import Store
from swarmq.collector.workers import Workers
from swarmq.config import SwarmJob, make_folder, resolve_amqp_url
from swarmq.errors import CollectorError, ConfigError, FencedError, MissingExtraError, WorkerLostError
from swarmq.hosts.follow import FollowedMembership, check_same_run
from swarmq.runtime import event_loop, logs
from swarmq.runtime.metrics_page import serve_metrics
from swarmq.transcripts.writer import TranscriptWriter

log = structlog.get_logger()

GB = 10**9
DAY_S = 86400.0
CHECK_S = 5.0
"""Seconds that a collector which takes over waits for the leader's answer."""


def run(job: SwarmJob, *, take_over: bool = False, standby: StandbyIntervals = INTERVALS) -> None:
    """Collect until SIGTERM or SIGINT, then finish the work in hand; a second signal ends the process at once. `take_over`: do not
    stand by while another collector leads, but take over from it.

    Raises ConfigError without a broker, BrokerError if the broker refuses the connection, CollectorError if the store is
    unusable.
    """
    logs.configure(role="collector", run=job.run)
    url = resolve_amqp_url(job.broker)
    if url is None:
        raise ConfigError("broker.url: the collector needs a RabbitMQ; set it, or $SWARMQ_AMQP_URL, or use `swarmq up`")
    make_folder(job.run_folder.path)
    event_loop.run(_collect(job, url, standby, take_over=take_over))


async def _collect(job: SwarmJob, url: str, standby: StandbyIntervals, *, take_over: bool) -> None:
    stop = _stop_on_signals()
    with closing(Store(job.run_folder.inbox, run=job.run)) as store, record_transcripts(job) as transcripts:
        async with AmqpBroker.open(url, name=f"collector.{job.run}", deadline_s=initial_connect_timeout_s()) as broker:

            async def collect(log: StandbyLog | None) -> None:
                async with AsyncExitStack() as stack:
                    opened = Workers.open(job.collector.turn_queues, url, run=job.run, silent_s=standby.silent_s)
                    workers = await stack.enter_async_context(opened) if job.collector.turn_queues else None
                    collector = Collector(job, broker, store, transcripts=transcripts, log=log, workers=workers)
                    await stack.enter_async_context(serve_collector_metrics(job, collector))
                    await collector.run(stop)

            if not job.collector.standby:
                await _leave_log(job, broker, store)
                await collect(None)
                return
            async with StandbyLog.open(broker, store, job, transcripts=transcripts, intervals=standby) as log:
                if take_over:
                    await check_like_leader(job.run, broker, patience_s=CHECK_S)
                while not stop.is_set() and await _lead(job, broker, log, stop, take_over=take_over):
                    take_over = False  # whoever takes over later may lead on
                    try:
                        await collect(log)
                    except* FencedError as fenced:
                        structlog.get_logger().warning("fenced", reason=str(_first(fenced)))
                    except* WorkerLostError as lost:  # as after a hang, in which another collector may have taken over
                        structlog.get_logger().warning("worker_lost", reason=str(_first(lost)))
                    finally:
                        log.release()


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _lead(job: SwarmJob, broker: AmqpBroker, log: StandbyLog, stop: asyncio.Event, *, take_over: bool) -> bool:
    """Stand by until this collector leads, and return True; return False when `stop` is set. Raises CollectorError if this host's
    version or clock differs from the leader's."""
    leading, stopping = asyncio.create_task(log.lead(take_over=take_over)), asyncio.create_task(stop.wait())
    checking = asyncio.create_task(check_like_leader(job.run, broker))
    waiting: set[asyncio.Task[Any]] = {leading, stopping, checking}
    try:
        while not (leading.done() or stopping.done()):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return not stop.is_set()
    finally:
        for task in (leading, stopping, checking):
            task.cancel()


async def check_like_leader(run: str, broker: Broker, *, patience_s: float | None = None) -> None:
    """Wait for the leading collector's answer, at most `patience_s` seconds. Raises CollectorError if its host's version of swarmq or
    clock differs, because a takeover would misread the store, or end every episode's time."""
    membership = FollowedMembership(run, broker, source="host.standby")
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(membership.follow())
        has_answered = await membership.wait_current(patience_s)
        following.cancel()
    try:
        if has_answered:
            check_same_run(membership)
    except ConfigError as error:
        raise CollectorError(f"this standby cannot take over: {error}") from error


async def _leave_log(job: SwarmJob, broker: AmqpBroker, store: Store) -> None:
    """Let a store that had standbys go on without them. Raises CollectorError while their log exists."""
    if not store.position().log:
        return
    stream = topology.log(job.run)
    if stream in await broker.depths([stream]):
        raise CollectorError(
            f"{job.run_folder.inbox} belongs to a run with standby collectors: set collector.standby = true; to go on without "
            f"them, stop them all and delete the stream {stream}"
        )
    store.leave_log()


def serve_collector_metrics(job: SwarmJob, collector: Collector) -> AbstractAsyncContextManager[None]:
    """Return a context that serves the collector's metrics, if the settings name a port."""
    if not (port := job.metrics.collector_port):
        return nullcontext()
    try:
        from swarmq.collector.metrics import CollectorMetrics  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtraError(
            f"metrics.collector_port needs {error.name}: pip install 'swarmq[collector]'"
        ) from error
    metrics = CollectorMetrics(collector.read_state, lambda: collector.num_outgoing)
    collector.commit_watchers.append(metrics.observe_commit)
    return serve_metrics(job.metrics.host, port, metrics.page)


@contextmanager
def record_transcripts(job: SwarmJob) -> Iterator[TranscriptWriter | None]:
    """Record transcripts while the context is open, unless the job's settings turn them off."""
    settings = job.transcripts
    if not settings.size_gb:
        yield None
        return
    writer = TranscriptWriter(
        job.run_folder.transcripts, size_bytes=int(settings.size_gb * GB), age_s=settings.age_days * DAY_S
    )
    with closing(writer):
        yield writer


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            os._exit(1)  # loses nothing: uncommitted messages are redelivered
        log.info("draining")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    return stop
