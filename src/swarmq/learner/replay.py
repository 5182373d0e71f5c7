"""Replay: train again from a checkpoint and the batch log, without broker and engine. The run folder is not changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import LearnerError
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.memory import plan
from swarmq.learner.methods import registry
from swarmq.learner.store import batch_log
from swarmq.learner.store.records import RunIdentity
from swarmq.learner.train.trainer import load_trainer

log = structlog.get_logger()


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
    identity, settings = RunIdentity.of(job, policy), job.policies[policy]
    if to_folder.exists() and (not to_folder.is_dir() or any(to_folder.iterdir())):
        raise LearnerError(f"{to_folder}: not empty; name a new folder for the replay")
    places = [place for place in batch_log.scan_log(folder.batch_log(policy), identity) if place.index.trained]
    if not places:
        raise LearnerError(f"{folder.batch_log(policy)}: no batch was trained yet; there is nothing to replay")
    registry.adopt(batch_log.read_record(places[-1]).methods)  # the trainer makes its optimizer
    start = _sound(from_checkpoint, identity) if from_checkpoint else None
    trainer = load_trainer(start, msgspec.structs.replace(settings, train=plan.adapt_to_single_rank(settings.train)))
    wanted = [place for place in places if place.index.version > trainer.version]
    if wanted and wanted[0].index.version != trainer.version + 1:
        raise LearnerError(
            f"the batch log continues with version {wanted[0].index.version}, not {trainer.version + 1}: "
            f"name a checkpoint of version {wanted[0].index.version - 1} or later"
        )
    changes = set[str]()
    for place in wanted:
        if until is not None and place.index.version > until:
            break
        record = batch_log.read_record(place)
        for change in set(registry.explain_changes(record.methods, job.methods_folder)) - changes:
            log.warning("method_changed", version=place.index.version, reason=change)
            changes.add(change)
        fields = trainer.step(record)
        report({"version": trainer.version, **fields})
        log.info("replayed", version=trainer.version, loss=fields["loss"])
    # the initial model's folder may not exist on the host to which the run was copied
    tokenizer = str(start.path) if start else settings.model
    save_load.save_checkpoint(to_folder, trainer, identity, model=tokenizer, keep=1)
    return trainer.version


def _sound(path: Path, identity: RunIdentity) -> discovery.Checkpoint:
    try:
        manifest = discovery.verify(path)
    except discovery.DamagedError as error:
        raise LearnerError(f"{path}: not a valid checkpoint: {error}") from error
    if difference := identity.difference(manifest.identity):
        raise LearnerError(f"{path}: the checkpoint is of another run, policy or model: {difference}")
    return discovery.Checkpoint(path=path, version=manifest.version)
