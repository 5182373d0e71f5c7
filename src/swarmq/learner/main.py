"""Entry point of `swarmq-learner`: locks the policy, starts collector, ranks and batch feeder, trains, stops in order.

  run ──> one GPU: the loop in this process          ──> batch feeder
      ──> more:    a process per rank (rank.py), rank 0 of them as above
      ──> collector, unless one runs elsewhere

Under `accelerate launch` every process is a rank already.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from swarmq.config import SwarmJob, make_folder
from swarmq.errors import ConfigError
from swarmq.learner.distributed.processes import is_main, own_rank, run_collector, run_ranks
from swarmq.learner.store.writer_lock import Fence, hold_lock
from swarmq.learner.teachers.availability import KEY_ENV
from swarmq.registries.engines import EngineRegistry
from swarmq.runtime import logs

if TYPE_CHECKING:
    from swarmq.weights.push.pusher import WeightPusher


def run(job: SwarmJob, policy: str, *, num_gpus: int = 1, with_collector: bool = True, no_push: bool = False) -> None:
    """Train `policy` until stopped or `max_steps`, on `num_gpus` ranks (processes on a machine without GPU).

    `no_push` leaves the engines alone. Raises LearnerError if training cannot go on.
    """
    if policy not in job.policies:
        raise ConfigError(f"policies: there is no {policy!r}; this job has {', '.join(job.policies)}")
    if not job.policies[policy].trained:
        raise ConfigError(f"policies.{policy}.trained is false: the policy is served, not trained")
    if job.policies[policy].train.teacher_policy:
        os.environ[KEY_ENV] = EngineRegistry(job).secret()  # the ranks inherit it
        job = job.find_teacher(policy)
    logs.configure(role=f"learner.{policy}", run=job.run)
    with contextlib.ExitStack() as stack:
        if is_main():
            make_folder(job.run_folder.path)
            stack.enter_context(hold_lock(job.run_folder.path / policy / "lock"))
            if with_collector:
                stack.enter_context(run_collector(job, policy))
        if own_rank() is None and num_gpus > 1:
            run_ranks(job, policy, num_ranks=num_gpus, no_push=no_push)
        else:
            train(job, policy, is_main=is_main(), no_push=no_push)


def train(job: SwarmJob, policy: str, *, is_main: bool, no_push: bool) -> None:
    """Run the loop of one rank. The caller holds the lock and keeps the collector running."""
    from swarmq.learner.distributed.accelerator import leave_group  # noqa: PLC0415  (torch is imported only in processes that train)

    _train(job, policy, is_main=is_main, no_push=no_push)
    leave_group()


def _train(job: SwarmJob, policy: str, *, is_main: bool, no_push: bool) -> None:
    """Run the loop. A function of its own, so that no model exists any more when it returns."""
    from swarmq.learner.feed.ipc import FeederLink, StopSignal  # noqa: PLC0415
    from swarmq.learner.teachers.tokenizer_checks import EngineTokenizers  # noqa: PLC0415
    from swarmq.learner.train.gpu_errors import map_gpu_errors  # noqa: PLC0415
    from swarmq.learner.train.loop import Learner  # noqa: PLC0415

    pusher = tokenizers = None
    if is_main and not no_push:
        settings = job.policies[policy]
        roster = EngineRegistry(job)
        tokenizers = EngineTokenizers(
            settings.model,
            lambda: roster.urls()[policy],
            max_model_len=settings.engine.max_model_len,
            secret=roster.secret(),
        )
        tokenizers.check()
        pusher = _pusher(job, policy)
    stop = StopSignal()
    with stop.handle_signals(), map_gpu_errors("the learner"):
        learner = Learner(job, policy, pusher=pusher, stop=stop, tokenizers=tokenizers)
        if not is_main:
            learner.run(None)
            return
        with FeederLink(learner.hello, stop) as link:
            learner.run(link)


def _pusher(job: SwarmJob, policy: str) -> WeightPusher | None:
    """Return the weight pusher, or None for a policy without engines, which is trained offline."""
    from swarmq.weights.push.pusher import WeightPusher  # noqa: PLC0415

    urls = job.policies[policy].engine.urls
    if not urls:
        return None
    roster, folder = EngineRegistry(job), job.run_folder.path / policy
    fence = Fence(folder / "lock")
    return WeightPusher(
        urls,
        folder / "weights",
        secret=roster.secret(),
        current=lambda: roster.urls()[policy],
        check=fence.check,
    )
