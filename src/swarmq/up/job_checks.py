"""Checks before a run starts: settings that cannot work are errors, settings without effect are warnings."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from swarmq.config import BrokerSettings, Critic, SwarmJob, Train, resolve_amqp_url
from swarmq.engine.server.gpus import FP8_CAPABILITY, GpuCapacity, check_fp8, find_visible_gpus
from swarmq.engine.server.launch import check_arguments, check_model, get_cpu_cache_bytes, is_cuda_build
from swarmq.engine.server.model_check import ModelFacts, fetch_num_parameters
from swarmq.errors import ConfigError, SetUpError
from swarmq.learner import preflight
from swarmq.learner.memory.estimate import list_frozen_models
from swarmq.learner.teachers.availability import find_teacher_trouble
from swarmq.learner.train import tracker_packages
from swarmq.observe.alerts import check_alerts
from swarmq.runtime.amqp_urls import redact_url, split_nodes
from swarmq.up.placement import ContextLimit, Placement, choose_context_limits, place_all


class RunPlan(NamedTuple):
    """A job with its open settings decided, and its placements."""

    job: SwarmJob
    """The job with a context limit for every policy that set none."""
    placements: dict[str, Placement]
    """GPUs of each policy's learner and engines, by policy."""


def plan_run(
    job: SwarmJob, report: Callable[[str], None], *, find_gpus: Callable[[], list[GpuCapacity]] = find_visible_gpus
) -> RunPlan:
    """Decide what the settings leave open, from the models and the GPUs that `find_gpus` returns. Raises SwarmqError for settings that
    cannot work."""
    gpus = check_settings(job, find_gpus=find_gpus)
    served = {name: policy for name, policy in job.policies.items() if not policy.engine.urls}
    models = {name: check_model(policy.model, trained=policy.trained) for name, policy in served.items()}
    judge_sizes = _reference_model_sizes(job, models) if gpus else {}
    host_cache = get_cpu_cache_bytes(os.environ)
    lengths = choose_context_limits(job.policies, models, gpus, judges=judge_sizes, host_cache=host_cache)
    job = _with_contexts(job, lengths)
    placements = place_all(job.policies, models, gpus, judges=judge_sizes)
    for name in job.trained:
        with _prefix_errors(name):
            preflight.check(job, name, ranks=_num_ranks(job.policies[name].train, placements.get(name)))
    for name, placement in placements.items():
        report(f"placement of {name}: {placement}")
    for name, length in lengths.items():
        report(f"context of {name}: {length} (policies.{name}.engine.max_model_len sets another)")
    for name in job.trained:
        if (url := job.policies[name].train.teacher_url) and (trouble := find_teacher_trouble(url)):
            report(
                f"warning: policies.{name}.train.teacher: the server at {url} {trouble}: start it; the learner waits with its batches until it answers"
            )
    for line in (*find_untrainable_requests(job, models), *find_ineffective_settings(job, models, placements)):
        report(f"warning: {line}")
    return RunPlan(job, placements)


def check_settings(
    job: SwarmJob, *, find_gpus: Callable[[], list[GpuCapacity]] = find_visible_gpus
) -> list[GpuCapacity]:
    """Return the GPUs that engines and learners can be placed on. Raises SwarmqError for settings that no model can make work."""
    check_alerts(job.alerts)
    _check_broker(job.broker)
    served = [policy for policy in job.policies.values() if not policy.engine.urls]
    for policy in served:
        check_arguments(policy)
    gpus = find_gpus() if served and is_cuda_build() else []
    for name, policy in job.policies.items():
        if not policy.engine.urls:
            check_fp8(f"policies.{name}.engine", policy.engine, dict(enumerate(gpus)))
    for name in job.trained:
        with _prefix_errors(name):
            train = job.policies[name].train
            tracker_packages.check_trackers(train.trackers)
            preflight.check_methods(job, name)
            if train.launcher and shutil.which(train.launcher[0]) is None:
                raise SetUpError(f"train.launcher: {train.launcher[0]!r} is not found on this host")
            if train.uses_fp8 and served and not train.launcher and not any(gpu.has_fp8 for gpu in gpus):
                raise SetUpError(
                    "train.mixed_precision is 'fp8', and this host has no GPU with FP8 (compute capability "
                    f"{FP8_CAPABILITY:g} or more): set it to 'auto'"
                )
            if not gpus:
                preflight.check_settings(train, _num_ranks(train, None))
    return gpus


def _check_broker(broker: BrokerSettings) -> None:
    if (url := resolve_amqp_url(broker)) is None:
        return
    split_nodes(url)  # raises for malformed URLs
    if broker.nodes > 1:
        raise ConfigError(
            f"broker.nodes is {broker.nodes}, but the RabbitMQ at {redact_url(url)} (broker.url, or $SWARMQ_AMQP_URL) runs already: "
            "list its nodes in the URL, or unset the URL for a private cluster"
        )


def _num_ranks(train: Train, placement: Placement | None) -> int | None:
    """Return the number of ranks of a learner: 1 without a GPU or a placement, None if only its launcher knows."""
    if train.launcher:
        return None
    return len(placement.learner) if placement else 1


@contextlib.contextmanager
def _prefix_errors(policy: str) -> Iterator[None]:
    """Prefix errors about a learner's setting with its policy."""
    try:
        yield
    except SetUpError as error:
        prefix = f"policies.{policy}." if str(error).startswith("train.") else ""
        raise SetUpError(f"{prefix}{error}") from error


def _reference_model_sizes(job: SwarmJob, models: Mapping[str, ModelFacts]) -> dict[str, list[int]]:
    """Return the parameter counts of the frozen models that each trained policy's learner holds."""
    return {
        name: [
            fetch_num_parameters(judge)
            for judge in list_frozen_models(job.train_of(name), job.policies[name].model).values()
        ]
        for name in models
        if job.policies[name].trained
    }


def _with_contexts(job: SwarmJob, lengths: Mapping[str, ContextLimit]) -> SwarmJob:
    found = {name: length.apply_to(job.policies[name]) for name, length in lengths.items()}
    return msgspec.structs.replace(job, policies={**job.policies, **found})


def find_untrainable_requests(job: SwarmJob, models: Mapping[str, ModelFacts]) -> Iterator[str]:
    """Yield a warning for each policy whose engine allows requests longer than its learner computes in one pass."""
    for name, model in models.items():
        served, train = _max_request_tokens(job, name, model), job.policies[name].train
        if job.policies[name].trained and served and served > train.micro_batch_tokens:
            yield (
                f"policies.{name}.engine.max_model_len allows requests of {served} tokens, but an episode with a request of more than "
                f"policies.{name}.train.micro_batch_tokens = {train.micro_batch_tokens} is sampled and then dropped (over_budget): "
                "raise train.micro_batch_tokens, or lower engine.max_model_len"
            )


def find_ineffective_settings(
    job: SwarmJob, models: Mapping[str, ModelFacts], placements: Mapping[str, Placement]
) -> Iterator[str]:
    """Yield a warning for each setting that changes nothing on this host or together with the other settings."""
    for name in job.trained:
        policy, whose, placement = job.policies[name], f"policies.{name}", placements.get(name)
        if policy.placement == "split" and placement is None:
            here = "its engines run elsewhere (engine.urls)" if policy.engine.urls else "this host has no GPU"
            yield f"{whose}.placement = 'split' has no effect: {here}"
        if policy.train.sharding in ("full", "hybrid") and _num_ranks(policy.train, placement) == 1:
            yield f"{whose}.train.sharding = {policy.train.sharding!r} has no effect: the learner has one rank"
        room = _max_request_tokens(job, name, models.get(name))
        if room and policy.sampling.max_tokens and policy.sampling.max_tokens > room:
            yield (
                f"{whose}.sampling.max_tokens = {policy.sampling.max_tokens} exceeds the engine's context of {room} tokens for prompt and "
                f"answer together ({whose}.engine.max_model_len, or the model's own maximum): lower it"
            )
        if policy.train.options and not job.own_methods - {policy.train.loss.name}:
            yield f"{whose}.train.options has no effect: the job names no method of your own that would read it"
        if policy.train.critic != Critic() and not job.train_of(name).needs_critic:
            yield f"{whose}.train.critic has no effect: only the advantage 'gae' with a loss that uses rewards has a critic"
        decays = {"schedule_steps": None, "schedule_end": 0.0, "decay_steps": None}
        used = {
            "constant": (),
            "linear": ("schedule_steps", "schedule_end"),
            "cosine": ("schedule_steps", "schedule_end"),
        }
        for constant, default in decays.items():
            if getattr(policy.train, constant) != default and constant not in used.get(policy.train.schedule, decays):
                yield f"{whose}.train.{constant} has no effect with schedule = {policy.train.schedule!r}"
        for constant, losses in policy.train.loss.find_unused_constants().items():
            yield (
                f"{whose}.train.loss.{constant} has no effect with loss.name = {policy.train.loss.name!r}, only with "
                f"{', '.join(losses)}"
            )


def _max_request_tokens(job: SwarmJob, policy: str, model: ModelFacts | None) -> int | None:
    """Return the number of tokens of the longest possible request, or None if unknown; `model` is None if the model is served
    elsewhere."""
    limits = (job.policies[policy].engine.max_model_len, model.max_length if model else None)
    return min((limit for limit in limits if limit), default=None)
