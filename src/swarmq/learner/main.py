"""A learner's rank: meets the other ranks, trains, and stops in order. Rank 0 also locks the policy, and keeps collector and batch
feeder running.

  swarmq-learner, torchrun, accelerate launch ──> rank 0 ──> lock, collector (unless one runs elsewhere), batch feeder
                                              └─> others: get job, model and batches from rank 0
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from swarmq.config import SwarmJob, make_folder
from swarmq.errors import ConfigError, SetUpError
from swarmq.learner import preflight
from swarmq.learner.distributed.processes import is_main, run_collector
from swarmq.learner.memory.ranks import num_ranks
from swarmq.learner.store.writer_lock import Fence, hold_lock
from swarmq.learner.teachers.availability import KEY_ENV
from swarmq.registries.engines import EngineRegistry
from swarmq.runtime import logs

if TYPE_CHECKING:
    from swarmq.weights.push.pusher import WeightPusher


def run(job: SwarmJob | None, policy: str | None, *, with_collector: bool = True, no_push: bool = False) -> None:
    """Train `policy` until stopped or until `max_steps`, as a single process or as one of the ranks that a launcher started.

    `job`, `policy`: None on a rank other than 0 whose host has no job file. `no_push`: push no weights to engines. Raises
    LearnerError if training cannot go on.
    """
    own = None if job is None or policy is None else _check(job, policy)
    with join_ranks(own) as (job, policy), contextlib.ExitStack() as stack:  # noqa: PLR1704 - rank 0's from here on
        logs.configure(role=f"learner.{policy}" + ("" if is_main() else f".{os.environ['RANK']}"), run=job.run)
        if is_main():
            make_folder(job.run_folder.path)
            stack.enter_context(hold_lock(job.run_folder.path / policy / "lock"))
            if with_collector:
                stack.enter_context(run_collector(job, policy))
        train(job, policy, no_push=no_push)


def _check(job: SwarmJob, policy: str) -> tuple[SwarmJob, str]:
    """Return the job, with the address of its teacher, and the policy. Raises ConfigError if the job does not train the policy."""
    if policy not in job.policies:
        raise ConfigError(f"policies: there is no {policy!r}; this job has {', '.join(job.policies)}")
    if not job.policies[policy].trained:
        raise ConfigError(f"policies.{policy}.trained is false: the policy is served, not trained")
    if is_main():
        preflight.check_methods(job, policy)
    if is_main() and job.policies[policy].train.teacher_policy:
        os.environ[KEY_ENV] = EngineRegistry(job).secret()
        job = job.find_teacher(policy)
    return job, policy


@contextlib.contextmanager
def join_ranks(own: tuple[SwarmJob, str] | None) -> Iterator[tuple[SwarmJob, str]]:
    """Meet the other ranks, and provide rank 0's job and policy on every rank. `own`: job and policy of this host; None without a
    job file."""
    if num_ranks() == 1:
        assert own
        yield own
        return
    from swarmq.learner.distributed.rendezvous import join_group  # noqa: PLC0415  (torch is imported only in processes that train)
    from swarmq.learner.model.attention_check import broadcast_from_rank0  # noqa: PLC0415

    monitor = join_group(own and _list_settings(*own))
    assert monitor is not None
    with monitor.report_errors():
        sent = (_keep_for_ranks(*own), os.environ.get(KEY_ENV, "")) if own and is_main() else None
        received = broadcast_from_rank0(sent)
        assert received
        if not is_main():
            own, os.environ[KEY_ENV] = received
        assert own
        yield own


def _list_settings(job: SwarmJob, policy: str) -> dict[str, Any]:
    """Return the settings that must be the same in the job files of all hosts. A teacher's address may differ."""
    train = msgspec.to_builtins(job.policies[policy].train)
    return {
        "run": job.run,
        f"policies.{policy}.model": job.policies[policy].model,
        **{f"policies.{policy}.train.{name}": value for name, value in train.items() if name != "teacher"},
    }


def _keep_for_ranks(job: SwarmJob, policy: str) -> tuple[SwarmJob, str]:
    """Return the job and policy for the other ranks, without settings that they do not need, above all the broker's password."""
    kept = SwarmJob(
        run=job.run,
        folder=job.folder,
        methods_folder=job.methods_folder,
        policies={policy: job.policies[policy]},
    )
    return kept, policy


def train(job: SwarmJob, policy: str, *, no_push: bool) -> None:
    """Run the loop of this rank. On rank 0, the caller holds the lock and keeps the collector running."""
    from swarmq.learner.distributed.rendezvous import leave_group  # noqa: PLC0415

    _train(job, policy, is_main=is_main(), no_push=no_push)
    leave_group()


def _train(job: SwarmJob, policy: str, *, is_main: bool, no_push: bool) -> None:
    """Run the loop. A function of its own, so that no model exists any more when it returns."""
    import torch  # noqa: PLC0415

    from swarmq.learner.feed.ipc import FeederLink, StopSignal  # noqa: PLC0415
    from swarmq.learner.teachers.tokenizer_checks import EngineTokenizers  # noqa: PLC0415
    from swarmq.learner.train.gpu_errors import map_gpu_errors  # noqa: PLC0415
    from swarmq.learner.train.loop import Learner  # noqa: PLC0415

    if job.train_of(policy).uses_fp8 and not torch.cuda.is_available():
        raise SetUpError(
            "train.mixed_precision: FP8 matrix products need a GPU, and torch finds none here; set it to 'auto' (replays and benchmarks "
            "emulate them on a CPU, which is slow)"
        )
    pusher = tokenizers = None
    if is_main and not no_push:
        settings = job.policies[policy]
        roster = EngineRegistry(job)
        tokenizers = EngineTokenizers(
            settings.model,
            lambda: roster.urls()[policy],
            max_model_len=settings.engine.max_model_len,
            replays_routing=settings.replays_routing,
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
        keep_cache=job.policies[policy].engine.keep_cache,
    )
