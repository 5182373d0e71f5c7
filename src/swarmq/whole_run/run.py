"""The course of `swarmq train`: a small run from its start to its report, in one process tree.

held-out reward ─> tasks fed as they are needed ─> agents attempt them here ─┬─ the learner's last step ─> held-out reward ─> report
                                                                             └─ Ctrl-C: all stop in order ─> report; a second
                                                                                call continues after the last step
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from rich.console import Console

from swarmq import keys
from swarmq.broker import topology
from swarmq.client.data.feed import count_fed, default_progress_file, feed
from swarmq.client.data.tasks import hash_source_name
from swarmq.client.episodes.event_loops import LoopThread
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker_processes import keep_serving, work_on_kinds
from swarmq.config import SwarmJob
from swarmq.runtime.logs import redirect_to
from swarmq.up.shutdown import describe_ended_policies, read_last_step
from swarmq.whole_run.plan import DataSet, TrainPlan
from swarmq.whole_run.report import TrainingRecord, write_report
from swarmq.whole_run.session import Session, make_reporter, open_session, progress_display

FINISH_S = 30.0
"""Seconds that open attempts get to finish after the last step; their episodes are not trained any more."""


class FeedOptions(TypedDict):
    """Arguments by which a feed recognises what it has fed before."""

    repeats: int
    seed: int
    progress_file: Path
    source: str
    curriculum: str | None


async def train(plan: TrainPlan, console: Console) -> None:
    """Train to the job's last step, or until cancelled, and write the report. Raises SwarmqError if a process of the run
    cannot start, or if an earlier call fed other tasks."""
    began = time.monotonic()
    report, job = make_reporter(console, began), plan.job
    record = TrainingRecord.load(job.run_folder.training)
    for kind, data in plan.tasks.items():
        _count_epochs(job, kind, data)

    def close() -> None:
        record.seconds += time.monotonic() - began
        record.save(job.run_folder.training)
        console.print(write_report(job.run_folder, record), markup=False, highlight=False, soft_wrap=True)
        report(f"report written to {job.run_folder.report}")

    with redirect_to(report):
        steps = _read_steps(job)
        is_trained = job.run_folder.job.exists() and len(describe_ended_policies(job, steps)) == len(steps)
        if is_trained and not _lacks_held_out(plan, record):
            for policy, step in steps.items():
                report(
                    f"{policy} has made its last step, {step}; to train further, raise policies.{policy}.train.max_steps and call again"
                )
            close()
            return
        try:
            await _bring_up_and_train(plan, console, report, record, is_trained=is_trained)
        except asyncio.CancelledError:
            done = ", ".join(f"{step} of {policy}" for policy, step in _read_steps(job).items())
            report(f"stopped after step {done}; the same command continues from there")
            if job.run_folder.resolved.exists():
                close()
            raise
        close()


def _read_steps(job: SwarmJob) -> dict[str, int]:
    return {policy: read_last_step(job, policy) for policy in job.trained}


async def _bring_up_and_train(
    plan: TrainPlan, console: Console, report: Callable[[str], None], record: TrainingRecord, *, is_trained: bool
) -> None:
    """Train, and measure the held-out reward before and after. `is_trained`: an earlier call made the last step, and died
    before it had measured."""
    agent_loop = LoopThread("swarmq-agents")
    try:
        async with (
            keep_serving(agent_loop, plan.agents.values()),
            open_session(plan.job, name="swarmq train", report=report) as session,
            progress_display(session.follower, console, report) as say,
        ):
            session.client.agent_loop = agent_loop
            if is_trained:
                await session.deployment.learners_done.wait()  # the engines have the last weights then
            else:
                if not record.held_out:
                    await _measure(plan, session, record, say)
                await _train(plan, session, say)
            await _measure(plan, session, record, say)
    finally:
        agent_loop.close()


async def _train(plan: TrainPlan, session: Session, say: Callable[[str], None]) -> None:
    """Feed and attempt tasks until every learner has made its last step."""
    stop, options = asyncio.Event(), RunnerOptions(concurrency=plan.concurrency, progress=False)
    async with asyncio.TaskGroup() as tasks:
        feeding = [
            tasks.create_task(_keep_fed(session, kind, data, plan.concurrency)) for kind, data in plan.tasks.items()
        ]
        working = tasks.create_task(work_on_kinds(session.client, plan.agents, options, stop))
        say(f"training to step {max(one.train.max_steps for one in plan.job.policies.values()) or '(until Ctrl-C)'}")
        await session.deployment.learners_done.wait()
        say("the last step is done")
        for one in feeding:
            one.cancel()
        stop.set()
        await asyncio.wait([working], timeout=FINISH_S)
        working.cancel()


async def _keep_fed(session: Session, kind: str, data: DataSet, concurrency: int) -> None:
    """Feed one epoch after the other, each when few tasks are left in the queue: one batch of them, and one for each concurrent episode."""
    job = session.deployment.job
    queue, few = topology.tasks(job.run, kind), job.groups.groups_per_batch * job.group_size(kind) + concurrency
    secret = keys.derive_task_secret(keys.load_root(job.run_folder.root_secret))
    epochs = _count_epochs(job, kind, data) + 1
    while True:
        await feed(
            session.broker, job.run, data.tasks, kind, epochs=epochs, secret=secret, **_feed_options(job, kind, data)
        )
        epochs += 1
        await _wait_for_room(session, queue, few)


def _count_epochs(job: SwarmJob, kind: str, data: DataSet) -> int:
    """Return how many epochs earlier calls have fed. Raises TaskError if they fed other tasks."""
    return count_fed(data.tasks, kind, **_feed_options(job, kind, data)) // (len(data.tasks) * job.group_size(kind))


def _feed_options(job: SwarmJob, kind: str, data: DataSet) -> FeedOptions:
    source = hash_source_name(data.name)
    return {
        "repeats": job.group_size(kind),
        "seed": next((job.policies[policy].train.seed for policy in job.trained), 0),
        "progress_file": default_progress_file(job.run_folder.path, job.run, kind, source),
        "source": source,
        "curriculum": data.curriculum,
    }


async def _wait_for_room(session: Session, queue: str, few: int) -> None:
    """Wait until fewer than `few` messages are in the queue, by a count that was made after this call."""
    since = time.time()
    await session.follower.until(lambda board: board.depths_at > since and board.depths.get(queue, 0) < few)


def _lacks_held_out(plan: TrainPlan, record: TrainingRecord) -> bool:
    return bool(plan.held_out) and max(_read_steps(plan.job).values(), default=0) not in record.held_out


async def _measure(plan: TrainPlan, session: Session, record: TrainingRecord, say: Callable[[str], None]) -> None:
    """Measure the held-out reward of the present weights, unless it is known."""
    if not _lacks_held_out(plan, record):
        return
    version = max(_read_steps(plan.job).values())
    say(f"measuring the held-out reward of version {version}")
    record.held_out[version] = {
        kind: await session.client.evaluate(
            data.tasks, plan.agents[kind], kind=kind, concurrency=plan.concurrency, progress=False
        )
        for kind, data in plan.held_out.items()
    }
    record.save(plan.job.run_folder.training)
    for kind, measured in record.held_out[version].items():
        say(f"held-out reward of {kind}, version {version}: {measured}")
