"""One examination: load the newest checkpoint before the stored batches, check the batches, replay them, compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from swarmq.config import RunFolder, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.checkpoint import discovery
from swarmq.learner.doctor.checks import checks
from swarmq.learner.doctor.mismatch import certify_fp8, compare, explain
from swarmq.learner.health.findings import Finding, judge_value
from swarmq.learner.memory import plan
from swarmq.learner.methods import registry
from swarmq.learner.model.float8 import multiply_unquantised
from swarmq.learner.model.layout_model import PlacedLayout
from swarmq.learner.store import batch_log
from swarmq.learner.store.records import BatchRecord, RunIdentity
from swarmq.learner.train.gpu_errors import map_gpu_errors
from swarmq.learner.train.trainer import Trainer, load_trainer
from swarmq.messages import Rollout
from swarmq.timeline import plan_rows, resolve

HEAD_LIMIT = {"no": 1e-3, "bf16": 0.2}
"""Precision -> largest difference in nats between two log-probabilities that rounding explains; under autocast, the model's own logits
are BF16."""
CHUNKS = 3
"""Minimum number of chunks when the head is compared with whole logits, so that one chunk has neighbours on both sides."""
WARM = 0.7
"""A temperature other than 1, which reveals code that ignores the temperature."""
LAYOUT_LIMIT = {"no": 1e-3, "bf16": 0.1}
"""Precision -> largest relative difference between the gradients of two layouts that rounding explains."""


def examine(job: SwarmJob, policy: str, folder: RunFolder, *, batches: int = 3) -> Iterator[Finding]:
    """Yield findings about the newest `batches` batches that can be replayed, or one finding if there are none. Writes nothing."""
    try:
        with map_gpu_errors("the replay"):
            yield from _replay_batches(job, policy, folder, batches)
    except LearnerError as error:
        aside = "; if an engine or learner uses the GPU, add --device cpu" if torch.cuda.is_available() else ""
        yield Finding(level="error", check="replay", text=f"stored batches could not be examined: {error}{aside}")


def _replay_batches(job: SwarmJob, policy: str, folder: RunFolder, batches: int) -> Iterator[Finding]:
    """Yield the findings of a replay. Raises LearnerError without stored batches, or if the model does not fit."""
    identity, settings = RunIdentity.of(job, policy), job.policies[policy]
    places = [p for p in batch_log.scan_log(folder.batch_log(policy), identity) if p.index.trained]
    if not places:
        raise LearnerError(f"{folder.batch_log(policy)}: no batch was trained yet; there is nothing to examine")
    start = _start(folder.checkpoints(policy), identity, places[-1].index.version, batches)
    registry.adopt(batch_log.read_record(places[-1]).methods)
    trainer = load_trainer(start, msgspec.structs.replace(settings, train=plan.adapt_to_single_rank(settings.train)))
    stored = [batch_log.read_record(p) for p in places if p.index.version > trainer.version][:batches]
    if not stored or stored[0].index.version != trainer.version + 1:
        raise LearnerError(
            f"no stored batch continues from version {trainer.version}: train a few more steps, or set train.keep_batches"
        )
    yield Finding(
        level="note",
        check="examined",
        text=f"batches {stored[0].index.version} to {stored[-1].index.version} of {places[-1].index.version}, from the "
        f"weights of version {trainer.version}",
    )
    yield from checks(settings, stored, trainer.traits, trainer.vocab_size)
    yield head_agrees(trainer, stored[0])
    yield layouts_agree(trainer, stored[0])
    compared = []
    for record in stored:
        compared.append(compare(trainer, record))
        trainer.step(record)
    yield from explain(compared)
    if settings.engine.uses_fp8:
        yield certify_fp8(compared, settings.train.loss.ratio_cap)


def _start(folder: Path, identity: RunIdentity, last: int, batches: int) -> discovery.Checkpoint | None:
    """Return the newest valid checkpoint that precedes the last `batches` batches; None for the initial model."""
    sound = []
    for path in sorted(folder.glob("step-*")):
        try:
            manifest = discovery.verify(path)
        except discovery.DamagedError:
            continue
        if not identity.difference(manifest.identity) and manifest.version < last:
            sound.append(discovery.Checkpoint(path=path, version=manifest.version))
    enough = [each for each in sound if each.version <= last - batches]
    return enough[-1] if enough else None


def head_agrees(trainer: Trainer, record: BatchRecord) -> Finding:
    """Compare the log-probabilities of a short turn from the chunked head with those from its whole logits."""
    check = "log-softmax in chunks and in FP32"
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not policy.head_apart:
        return Finding(
            level="note", check=check, text="this model computes its own logits, all logits of a pass at once, in FP32"
        )
    turns = (turn for episode in record.episodes for turn in resolve(episode.turns))
    turn = min(turns, key=lambda turn: (max(CHUNKS - len(turn.logprobs), 0), len(turn)))
    (layout,) = plan_rows([[turn]], budget=len(turn))
    placed, device = PlacedLayout.of(layout, trainer.accelerator.device), trainer.accelerator.device
    temperatures = torch.full((layout.num_trained,), WARM, device=device)
    chunk = max(1, layout.num_trained // CHUNKS)
    with torch.no_grad():
        policy.head_chunk = chunk
        try:
            chunked = trainer.model(placed, temperatures).logprobs
            policy.head_apart = False
            whole = trainer.model(placed, temperatures).logprobs
        finally:
            policy.head_apart, policy.head_chunk = True, None
    apart, limit = float((chunked - whole).abs().max()), HEAD_LIMIT[trainer.accelerator.mixed_precision]
    return judge_value(
        check,
        bad=not apart <= limit or chunked.dtype != torch.float32,
        ok=f"{len(whole)} log-probabilities in FP32, {chunk} at a time, within {apart:.2g} of those of whole logits",
        wrong=f"log-probabilities in {chunked.dtype}, {apart:.2g} from those of whole logits (limit {limit:g}): report it",
    )


def layouts_agree(trainer: Trainer, record: BatchRecord) -> Finding:
    """Compare the gradient of one group under the trained layout with the gradient when every timeline has its own row. Both without FP8
    products, whose scales depend on which tokens share a product: their rounding would hide what a layout changes."""
    settings = trainer.settings(record)
    group = [e for e in record.episodes if e.group_id == record.episodes[0].group_id]
    longest = max(len(turn) for episode in group for turn in resolve(episode.turns))
    small = msgspec.structs.replace(settings, layout="rows", micro_batch_tokens=longest)
    with multiply_unquantised(trainer.lm):
        first, second = (_gradient(trainer, group, train) for train in (settings, small))
    apart = sum(float(((a - b) ** 2).sum()) for a, b in zip(first, second, strict=True)) ** 0.5
    size = sum(float((a**2).sum()) for a in first) ** 0.5
    relative, limit = apart / max(size, 1e-30), LAYOUT_LIMIT[trainer.accelerator.mixed_precision]
    return judge_value(
        "layout changes nothing",
        bad=not relative <= limit,  # also true for NaN
        ok=f"gradients of two layouts differ by {relative:.2g} relative",
        wrong=f"gradients of two layouts differ by {relative:.2g} relative (limit {limit:g}): set train.layout = 'rows' and report it",
    )


def _gradient(trainer: Trainer, group: list[Rollout], train: Train) -> list[Tensor]:
    trainer.optimizer.zero_grad()
    work = build_rank_batch(group, train, trainer.traits)
    trainer.accumulate(work, train, teacher=trainer.ask_teacher(group, work, train))
    gradient = [p.grad.detach().clone() for p in trainer.model.parameters() if p.grad is not None]
    trainer.optimizer.zero_grad()
    return gradient
