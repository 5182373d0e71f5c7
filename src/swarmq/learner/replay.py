"""Replay: train again from a checkpoint and the batch log, without broker and engine. The run folder is not changed.

replay     the stored steps as they were trained
compare    the same episodes under other settings, beside the stored steps:

checkpoint ──> original trainer ── record as it is ────────> metrics, weights ─┐
      └──────> changed trainer ─── record, other settings ─> metrics, weights ─┴─> ReplayedStep, one for each step
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor

from swarmq.config import RunFolder, SwarmJob, Train
from swarmq.errors import ConfigError, LearnerError, SetUpError, SwarmqError
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.memory import plan
from swarmq.learner.methods import registry
from swarmq.learner.methods.credit import group_by_slot, update_baselines
from swarmq.learner.methods.losses import MAX_LOG_RATIO
from swarmq.learner.store import batch_log
from swarmq.learner.store.batch_log import RecordPlace
from swarmq.learner.store.records import BatchRecord, RunIdentity
from swarmq.learner.store.token_trace import EpisodeTrace
from swarmq.learner.train.trainer import Trainer, load_trainer
from swarmq.messages import Rollout, unpack_floats

log = structlog.get_logger()


class StepDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer reports of one step. All but `grad_norm` and `loss` describe the weights before the step."""

    loss: float
    kl_k3: float
    """k3 estimate of the KL divergence of these weights from those that sampled, in nats per token."""
    effective_samples: float
    """Effective sample size of the importance ratios, as a share of the tokens."""
    entropy: float
    grad_norm: float
    weighted_reward: float
    """Mean reward over the sampled tokens, weighted by their importance ratios: above `reward`, these weights prefer tokens of
    rewarded episodes."""
    reward: float
    """Mean reward over the same tokens, without weights."""
    tokens_trained: int
    skipped: str = ""
    """Why the weights stayed as they were; empty if they did not."""


class ReplayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step as it was trained, and under other settings."""

    version: int
    original: StepDiagnostics
    replayed: StepDiagnostics
    distance: float
    """L2 distance between the two sets of weights after the step."""
    original_moved: float
    """L2 distance of the original weights from those before the first changed step."""
    replayed_moved: float
    cosine: float | None
    """Cosine between both movements since then; None if one of them is 0."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A replay under other settings."""

    policy: str
    changes: tuple[str, ...]
    """`train.X: before -> after`, by the first step."""
    steps: tuple[ReplayedStep, ...]
    groups_missing: int
    """Number of groups that were dropped for equal rewards when the run was trained, and therefore are not in the batch log."""


class _Source(msgspec.Struct, frozen=True):
    """What a replay reads."""

    identity: RunIdentity
    log: list[RecordPlace]
    """All records, also those that only hold drops."""
    start: discovery.Checkpoint | None

    @property
    def places(self) -> list[RecordPlace]:
        """Records that were trained."""
        return [place for place in self.log if place.index.trained]

    def count_equal_groups(self, first: int, last: int) -> int:
        """Return how many groups were dropped for equal rewards in steps `first` to `last`."""
        numbered = batch_log.number_steps(self.log)
        return sum(place.index.groups_equal for step, place in numbered if first <= step <= last)

    def after(self, version: int) -> list[RecordPlace]:
        """Return the records after `version`. Raises LearnerError if the log does not continue there."""
        wanted = [place for place in self.places if place.index.version > version]
        if wanted and wanted[0].index.version != version + 1:
            raise LearnerError(
                f"the batch log continues with version {wanted[0].index.version}, not {version + 1}: "
                f"name a checkpoint of version {wanted[0].index.version - 1} or later"
            )
        return wanted


def replay(
    job: SwarmJob,
    policy: str,
    folder: RunFolder,
    *,
    to_folder: Path,
    from_checkpoint: Path | None = None,
    until: int | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> int:
    """Train to version `until` (by default the end of the log), write a checkpoint of it, and return its version.

    Without `from_checkpoint`, starts from the initial model. `report`: called with the metrics of every step. Raises
    LearnerError if the checkpoint is invalid, or if the log is empty or does not continue from it.
    """
    source = _open(job, policy, folder, to_folder, from_checkpoint)
    trainer = _load(source, job, policy)
    recorded = _Records(job)
    for place in source.after(trainer.version):
        if until is not None and place.index.version > until:
            break
        fields = trainer.step(recorded.read(place))
        report({"version": trainer.version, **fields})
        log.info("replayed", version=trainer.version, loss=fields["loss"])
    _save(to_folder, trainer, source, job, policy)
    return trainer.version


def compare(
    job: SwarmJob,
    policy: str,
    folder: RunFolder,
    *,
    sets: Sequence[str],
    to_folder: Path,
    from_checkpoint: Path | None = None,
    first: int | None = None,
    last: int | None = None,
    report: Callable[[ReplayedStep], None] = lambda _: None,
) -> Comparison:
    """Train the stored episodes from step `first` (by default the first one after the checkpoint) to `last` (the end of the log)
    twice, as they were trained and with the settings `sets` (`train.X=VALUE`). Writes a checkpoint of the latter.

    Needs memory for two trainers. Raises ConfigError for settings that cannot be changed and for steps that are not there, LearnerError as `replay`, and
    SetUpError if the changed method fails.
    """
    source = _open(job, policy, folder, to_folder, from_checkpoint)
    begin = source.start.version if source.start else 0
    first = begin + 1 if first is None else first
    _check_steps(source.log, first, last)
    if first <= begin:
        raise ConfigError(
            f"--steps: step {first} lies before the checkpoint, which is of version {begin}; name an earlier one"
        )
    chosen = [place for place in source.after(begin) if last is None or place.index.version <= last]
    changed = [place for place in chosen if place.index.version >= first]
    recorded, change = _Records(job), _Change(job, policy, sets)
    before = batch_log.read_record(changed[0])
    after = change.apply(before)
    assert before.settings
    assert after.settings
    original = _load(source, job, policy)
    with _explain_failure(before.index.version, sets):
        replayed = _load(source, job, policy, after)
    meter: _WeightMeter | None = None
    steps: list[ReplayedStep] = []
    for place in chosen:
        record = recorded.read(place)
        if place.index.version < first:
            original.step(record)
            replayed.step(record)
            continue
        meter = meter or _WeightMeter(original, replayed)
        traced = msgspec.structs.replace(record, settings=_traced(record.settings))
        here = diagnose(original.step(traced), traced.episodes, original.token_traces)
        with _explain_failure(place.index.version, sets):
            there = diagnose(replayed.step(change.next_record(traced)), traced.episodes, replayed.token_traces)
        steps.append(meter.measure(place.index.version, here, there))
        report(steps[-1])
    _save(to_folder, replayed, source, job, policy)
    return Comparison(
        policy=policy,
        changes=tuple(_list_differences(before, after)),
        steps=tuple(steps),
        groups_missing=source.count_equal_groups(first, changed[-1].index.version),
    )


def find_start(job: SwarmJob, policy: str, folder: RunFolder, first: int, last: int | None) -> Path | None:
    """Return the newest valid checkpoint before step `first`; None if that is the initial model. Raises ConfigError if the batch
    log lacks one of the steps."""
    _check_steps(batch_log.scan_log(folder.batch_log(policy), RunIdentity.of(job, policy)), first, last)
    for path in reversed(discovery.list_checkpoints(folder.checkpoints(policy))):
        if discovery.version_of(path) < first:
            try:
                discovery.verify(path)
            except discovery.DamagedError as error:
                log.warning("checkpoint_damaged", path=str(path), reason=str(error), action="an earlier one is used")
            else:
                return path
    return None


def diagnose(fields: Mapping[str, Any], episodes: Sequence[Rollout], traces: Sequence[EpisodeTrace]) -> StepDiagnostics:
    """Return the diagnostics of a step from its metrics and the traces of its tokens."""
    rewards = {episode.episode_id: episode.reward for episode in episodes}
    behavior = {(episode.episode_id, turn.call_id): turn.logprobs for episode in episodes for turn in episode.turns}
    weights = weighted = tokens = total = 0.0
    for trace in traces:
        for turn in trace.turns:
            gap = np.frombuffer(turn.logprobs, "<f4") - np.asarray(
                unpack_floats(behavior[trace.episode_id, turn.call_id])
            )
            ratio = float(np.exp(np.minimum(gap, MAX_LOG_RATIO), dtype=np.float64).sum())
            weights, weighted = weights + ratio, weighted + ratio * rewards[trace.episode_id]
            tokens, total = tokens + len(gap), total + len(gap) * rewards[trace.episode_id]
    return StepDiagnostics(
        **{
            name: fields[name]
            for name in ("loss", "kl_k3", "effective_samples", "entropy", "grad_norm", "tokens_trained")
        },
        weighted_reward=weighted / weights if weights else 0.0,
        reward=total / tokens if tokens else 0.0,
        skipped=fields.get("skipped", ""),
    )


class _Records:
    """Reader of records that warns, once for each method, if its code is not the recorded one."""

    def __init__(self, job: SwarmJob) -> None:
        self._folder = job.methods_folder
        self._known: set[str] = set()

    def read(self, place: RecordPlace) -> BatchRecord:
        record = batch_log.read_record(place)
        for change in set(registry.explain_changes(record.methods, self._folder)) - self._known:
            log.warning("method_changed", version=place.index.version, reason=change)
            self._known.add(change)
        return record


class _Change:
    """Settings that a replay uses in place of the recorded ones."""

    def __init__(self, job: SwarmJob, policy: str, sets: Sequence[str]) -> None:
        prefix = f"policies.{policy}."
        self._sets = [text if text.startswith(prefix) else prefix + text for text in sets]
        if wrong := [text for text in self._sets if not text.startswith(f"{prefix}train.")]:
            raise ConfigError(
                f"--set {wrong[0].removeprefix(prefix)}: a replay changes settings of train alone, because the episodes are sampled"
            )
        sft = f"{prefix}train.sft"
        if drawn := [text for text in self._sets if text.startswith(sft) and not text.startswith(f"{sft}.weight=")]:
            raise ConfigError(
                f"--set {drawn[0].removeprefix(prefix)}: a replay trains the demonstrations that the batch log has; only "
                "train.sft.weight can be changed"
            )
        self._is_for_all_kinds = any(text.startswith(f"{prefix}train.advantage=") for text in self._sets)
        self._job, self._policy = msgspec.to_builtins(job), policy
        registry.look_in(job.methods_folder)
        self._read_code = functools.cache(functools.partial(registry.read_code, folder=str(Path.cwd())))
        self._baselines: dict[str, float] = {}

    def apply(self, record: BatchRecord) -> BatchRecord:
        """Return the record with the changed settings. Methods that the change names are read from the working directory; all others
        are the recorded ones. Raises ConfigError for values that settings cannot have, SetUpError for a method that is not there."""
        assert record.settings is not None
        tree = msgspec.to_builtins(record.settings) | ({"advantages": {}} if self._is_for_all_kinds else {})
        policies = self._job["policies"]
        job = self._job | {"policies": policies | {self._policy: policies[self._policy] | {"train": tree}}}
        train = SwarmJob.build(job, sets=self._sets, origin="the recorded settings").policies[self._policy].train
        named = {text.partition("=")[2] for text in self._sets}
        codes = {code.name: code for code in record.methods}
        methods = tuple(
            codes[name] if name in codes and name not in named else self._read_code(kind, name)
            for _, kind, name in registry.list_methods(train)
        )
        return msgspec.structs.replace(record, settings=train, methods=methods)

    def next_record(self, record: BatchRecord) -> BatchRecord:
        """Return the changed record of the next step. `ema` baselines that the run did not keep begin with the first record."""
        changed, baselines = self.apply(record), record.baselines or self._baselines
        assert changed.settings is not None
        self._baselines = update_baselines(baselines, group_by_slot(record.episodes), changed.settings)
        return msgspec.structs.replace(changed, baselines=baselines)


class _WeightMeter:
    """Distances between the trained weights of two trainers that have equal weights now."""

    def __init__(self, original: Trainer, replayed: Trainer) -> None:
        self._original, self._replayed = _trained_weights(original), _trained_weights(replayed)
        if self._original.keys() != self._replayed.keys():
            raise ConfigError("train.lora: a replay cannot change which weights are trained")
        self._start = {name: weight.detach().cpu().clone() for name, weight in self._original.items()}

    def measure(self, version: int, original: StepDiagnostics, replayed: StepDiagnostics) -> ReplayedStep:
        apart = moved = moved_too = product = 0.0
        for name, start in self._start.items():
            one, other = (weights[name].detach().cpu().double() for weights in (self._original, self._replayed))
            here, there = one - start, other - start
            apart += float((one - other).square().sum())
            moved += float(here.square().sum())
            moved_too += float(there.square().sum())
            product += float((here * there).sum())
        both = math.sqrt(moved * moved_too)
        return ReplayedStep(
            version=version,
            original=original,
            replayed=replayed,
            distance=math.sqrt(apart),
            original_moved=math.sqrt(moved),
            replayed_moved=math.sqrt(moved_too),
            cosine=product / both if both else None,
        )


def _trained_weights(trainer: Trainer) -> dict[str, Tensor]:
    parameters: Iterator[tuple[str, torch.nn.Parameter]] = trainer.lm.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def _open(job: SwarmJob, policy: str, folder: RunFolder, to_folder: Path, from_checkpoint: Path | None) -> _Source:
    """Check what a replay reads and writes. Raises LearnerError."""
    identity = RunIdentity.of(job, policy)
    if to_folder.exists() and (not to_folder.is_dir() or any(to_folder.iterdir())):
        raise LearnerError(f"{to_folder}: not empty; name a new folder for the replay")
    places = batch_log.scan_log(folder.batch_log(policy), identity)
    if not any(place.index.trained for place in places):
        raise LearnerError(f"{folder.batch_log(policy)}: no batch was trained yet; there is nothing to replay")
    return _Source(identity, places, _sound(from_checkpoint, identity) if from_checkpoint else None)


def _check_steps(places: Sequence[RecordPlace], first: int, last: int | None) -> None:
    versions = [place.index.version for place in places if place.index.trained]
    if missing := [step for step in (first, last) if step is not None and step not in versions]:
        there = f"the batch log has steps {versions[0]} to {versions[-1]}" if versions else "no batch was trained yet"
        raise ConfigError(f"--steps: step {missing[0]} cannot be replayed: {there}")


def _load(source: _Source, job: SwarmJob, policy: str, changed: BatchRecord | None = None) -> Trainer:
    """Return a trainer of the run, or one with the settings and methods of a changed record."""
    record = changed or batch_log.read_record(source.places[-1])
    registry.adopt(record.methods)  # the trainer makes its optimizer
    settings = job.policies[policy]
    train = changed.settings if changed and changed.settings else settings.train
    return load_trainer(source.start, msgspec.structs.replace(settings, train=plan.adapt_to_single_rank(train)))


def _save(to_folder: Path, trainer: Trainer, source: _Source, job: SwarmJob, policy: str) -> None:
    # the initial model's folder may not exist on the host to which the run was copied
    tokenizer = str(source.start.path) if source.start else job.policies[policy].model
    save_load.save_checkpoint(to_folder, trainer, source.identity, model=tokenizer, keep=1)


def _traced(train: Train | None) -> Train | None:
    return msgspec.structs.replace(train, token_log=True) if train else None


def _list_differences(before: BatchRecord, after: BatchRecord) -> Iterator[str]:
    was, now = (_flatten(msgspec.to_builtins(record.settings), "train") for record in (before, after))
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) != now.get(name):
            yield f"{name}: {was.get(name)} -> {now.get(name)}"
    hashes = {code.name: code.sha256 for code in before.methods}
    for code in dict.fromkeys(after.methods):
        if hashes.get(code.name, code.sha256) != code.sha256:
            yield f"code of {code.name}: {hashes[code.name][:12]} -> {code.sha256[:12]}"


def _flatten(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{path}.{key}") if isinstance(value, dict) else {f"{path}.{key}": value}
    return flat


@contextlib.contextmanager
def _explain_failure(version: int, sets: Sequence[str]) -> Iterator[None]:
    """Raise SetUpError in place of an error of a changed method, which may raise anything."""
    try:
        yield
    except SwarmqError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SetUpError(
            f"step {version} with {', '.join(sets)}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        ) from error


def _sound(path: Path, identity: RunIdentity) -> discovery.Checkpoint:
    try:
        manifest = discovery.verify(path)
    except discovery.DamagedError as error:
        raise LearnerError(f"{path}: not a valid checkpoint: {error}") from error
    if difference := identity.difference(manifest.identity):
        raise LearnerError(f"{path}: the checkpoint is of another run, policy or model: {difference}")
    return discovery.Checkpoint(path=path, version=manifest.version)
