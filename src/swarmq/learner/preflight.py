"""Preflight checks shared by `swarmq up` and the learner: refuse settings before anything starts. Without torch."""

from __future__ import annotations

import importlib.util

from swarmq.config import SwarmJob, Train, is_own_method
from swarmq.errors import SetUpError
from swarmq.learner.checkpoint import discovery
from swarmq.learner.demonstrations import load_demonstrations
from swarmq.learner.memory.estimate import list_frozen_models
from swarmq.learner.memory.ranks import check_offload, check_rank_count
from swarmq.learner.methods import registry
from swarmq.learner.store.records import RunIdentity
from swarmq.learner.store.routing_shape import RoutingShape
from swarmq.learner.teachers.token_alignment import TokenAligner
from swarmq.learner.teachers.tokenizer_checks import check_judge
from swarmq.learner.train.tracker_packages import check_trackers


def check(job: SwarmJob, policy: str, *, ranks: int | None) -> None:
    """Raise LearnerError for any setting that the policy's learner with this number of ranks (None: unknown) would refuse. Also
    compares the tokenizers of reference and teacher with the policy's, which needs transformers."""
    model, train = job.policies[policy].model, job.train_of(policy)
    check_settings(train, ranks)
    load_demonstrations(model, train)
    if train.routing_replay:
        from swarmq.learner.memory.outline import load_config  # noqa: PLC0415 - imports torch

        RoutingShape.of(load_config(model))
    if found := discovery.find_newest(job.run_folder.checkpoints(policy), RunIdentity.of(job, policy), hashed=False):
        discovery.check_continues(found.path, train.lora)
    if train.teacher_tokenizer:
        TokenAligner(model, train.teacher_tokenizer)
    for role, source in list_frozen_models(train, model).items():
        if source != model:
            check_judge(model, source, role=role)


def check_methods(job: SwarmJob, policy: str) -> None:
    """Load the user's own methods with which the policy is trained, and check them on random episodes. Raises LearnerError, which
    begins with the path of the setting."""
    train = job.train_of(policy)
    if not registry.read_own(train, job.methods_folder):
        return
    from swarmq.learner.methods.check import check_named  # noqa: PLC0415 - imports torch

    for setting, kind, name in registry.list_methods(train):
        if is_own_method(name):
            try:
                check_named(kind, name, registry.find_method(kind, name), train)
            except SetUpError as error:
                raise SetUpError(f"train.{setting}: {error}") from error


def check_settings(train: Train, ranks: int | None) -> None:
    """Raise LearnerError for settings that are wrong for any model."""
    check_trackers(train.trackers)
    if train.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise SetUpError("train.optimizer: 'adamw_8bit' needs bitsandbytes: pip install 'swarmq[optimizers]'")
    if ranks is not None:
        check_rank_count(train, ranks)
        check_offload(train, ranks)
