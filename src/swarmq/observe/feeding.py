"""Feeding the task queues of a run from its folder, for the command line and a host's daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from swarmq import keys, live_settings
from swarmq.client.data.feed import default_progress_file, feed
from swarmq.client.data.tasks import SwarmTask
from swarmq.collector.ledger import read_changes
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.observe.control_requests import send_eval_tasks
from swarmq.observe.live_runs import load_live_run, open_broker


class Fed(NamedTuple):
    """What was fed."""

    job: SwarmJob
    """The settings of the run, with those that were changed while it was up."""
    kind: str
    published: int
    """Number of published slots, or of tasks that were stored for evaluation."""


async def feed_training(
    folder: RunFolder,
    tasks: Iterable[SwarmTask],
    kind: str | None,
    *,
    option: str,
    source: str,
    repeats: int | None = None,
    epochs: int = 1,
    seed: int | None = None,
    curriculum: str | None = None,
    restart: str = "",
    report: Callable[[int, int], None] = lambda _confirmed, _total: None,
) -> Fed:
    """Publish tasks of a data set to the queue of their kind.

    `kind`: None: the only kind. `option`: its name in messages. `repeats`: None: the group size of the kind. Everything else is as in
    `client.data.feed`. Raises ConfigError if the choice of the kind is ambiguous or wrong.
    """
    job, chosen = _choose_kind(folder, kind, option)
    async with open_broker(job, "swarmq feed") as broker:
        count = await feed(
            broker,
            job.run,
            tasks,
            chosen,
            repeats=repeats or job.group_size(chosen),
            epochs=epochs,
            seed=seed,
            curriculum=curriculum,
            progress_file=default_progress_file(folder.path, job.run, chosen, source),
            source=source,
            secret=keys.derive_task_secret(keys.load_root(folder.root_secret)),
            restart=restart,
            report=report,
        )
    return Fed(job, chosen, count)


async def feed_evaluation(
    folder: RunFolder,
    tasks: Iterable[SwarmTask],
    kind: str | None,
    *,
    option: str,
    source: str,
    repeats: int | None = None,
) -> Fed:
    """Store tasks for evaluation rounds. `repeats`: None: the largest of `eval.k`. Everything else is as in `feed_training`."""
    job, chosen = _choose_kind(folder, kind, option)
    async with open_broker(job, "swarmq feed --eval") as broker:
        count = await send_eval_tasks(broker, job, tasks, chosen, repeats=repeats or max(job.eval.k), source=source)
    return Fed(job, chosen, count)


def _choose_kind(folder: RunFolder, kind: str | None, option: str) -> tuple[SwarmJob, str]:
    job = live_settings.apply_changes(load_live_run(folder.path), read_changes(folder.inbox))
    chosen = kind or (next(iter(job.mix)) if len(job.mix) == 1 else None)
    if chosen not in job.task_kinds:
        problem = f"{option} {kind}: unknown kind" if kind else f"{option}: this job has several kinds"
        raise ConfigError(f"{problem}; choose one of {', '.join(job.task_kinds)}")
    return job, chosen
