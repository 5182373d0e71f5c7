"""Feeding the task queues of a run from its folder, for the command line and a host's daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarmq import keys, live_settings
from swarmq.client.data.feed import default_progress_file, feed
from swarmq.client.data.tasks import SwarmTask
from swarmq.collector.ledger import read_changes
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.observe.control_requests import send_eval_tasks
from swarmq.observe.live_runs import load_live_run, open_broker


def choose_kind(job: SwarmJob, kind: str | None, *, option: str) -> str:
    """Return the given kind, or the only one there is. Raises ConfigError, with the name of the `option`, if the choice is ambiguous or wrong."""
    chosen = kind or (next(iter(job.mix)) if len(job.mix) == 1 else None)
    if chosen not in job.task_kinds:
        problem = f"{option} {kind}: unknown kind" if kind else f"{option}: this job has several kinds"
        raise ConfigError(f"{problem}; choose one of {', '.join(job.task_kinds)}")
    return chosen


async def feed_training(
    folder: RunFolder,
    tasks: Iterable[SwarmTask],
    kind: str,
    *,
    source: str,
    repeats: int | None = None,
    epochs: int = 1,
    seed: int | None = None,
    curriculum: str | None = None,
    resume: bool = True,
    report: Callable[[int, int], None] = lambda _confirmed, _total: None,
) -> int:
    """Publish tasks of a data set to the queue of their kind, and return the number of published slots. `repeats`: None: the group size of
    the kind. Everything else is as in `client.data.feed`."""
    job = live_settings.apply_changes(load_live_run(folder.path), read_changes(folder.inbox))
    async with open_broker(job, "swarmq feed") as broker:
        return await feed(
            broker,
            job.run,
            tasks,
            kind,
            repeats=repeats or job.group_size(kind),
            epochs=epochs,
            seed=seed,
            curriculum=curriculum,
            progress_file=default_progress_file(folder.path, job.run, kind, source),
            source=source,
            secret=keys.derive_task_secret(keys.load_root(folder.root_secret)),
            resume=resume,
            report=report,
        )


async def feed_evaluation(
    folder: RunFolder, tasks: Iterable[SwarmTask], kind: str, *, source: str, repeats: int | None = None
) -> int:
    """Store tasks for evaluation rounds, and return their number. `repeats`: None: the largest of `eval.k`."""
    job = load_live_run(folder.path)
    async with open_broker(job, "swarmq feed --eval") as broker:
        return await send_eval_tasks(broker, job, tasks, kind, repeats=repeats or max(job.eval.k), source=source)
