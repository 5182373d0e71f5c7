"""Comparison of replayed batches with the engine's log-probabilities, and the causes of differences.

Sampled tokens are grouped by the cause that can make engine and learner differ: only arithmetic (same weights), older weights, a
weight push in the middle of the answer, a repaired prompt. If they differ even under the same weights, the usual causes are
tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from swarmq.learner.batching.micro_batches import MicroBatch, build_rank_batch
from swarmq.learner.health.findings import Finding, Level, judge_value
from swarmq.learner.model.layout_model import PlacedLayout
from swarmq.learner.store.records import BatchRecord
from swarmq.learner.train.trainer import Trainer
from swarmq.runtime.wording import count_of

Floats = NDArray[np.float64]

SAME_WEIGHTS_LIMIT = 0.01
"""Largest k3 per token under the same weights. BF16 engines and learners that compute the same model stay below it."""
BROKEN = 0.1
HELD = "held to a grammar"
MIN_EFFECTIVE = 0.5
"""Smallest effective sample size, as a share of the tokens, of the truncated importance ratios under the same weights. Below it,
fewer than half of the sampled tokens would teach anything."""
EXPLAINS = 0.25
"""Maximum share of a mismatch that may remain after a correction, for the corrected cause to count as its explanation."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens for which one cause can make engine and learner differ."""

    name: str
    tokens: int
    k3: float
    mean_gap: float
    """Mean of logprobs - behavior_logprobs."""
    p99: float
    """99th percentile of |logprobs - behavior_logprobs|."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """All N sampled tokens of a batch; every array is [N]."""

    logprobs: Floats
    """Log-probability under the weights before the batch's step."""
    at_one: Floats
    """Log-probability at temperature 1 under the same weights."""
    behavior_logprobs: Floats
    lag: NDArray[np.int64]
    """Steps between the weights that sampled a token and those of `logprobs`."""
    pushed: NDArray[np.bool_]
    """Whether the token was sampled after a weight push in the middle of its answer."""
    repaired: NDArray[np.bool_]
    held: NDArray[np.bool_]
    """Whether the token was sampled under a grammar, so that behavior_logprobs is normalised over the allowed tokens and
    logprobs over all."""


def compare(trainer: Trainer, record: BatchRecord) -> Compared:
    """Return the learner's log-probabilities of a batch, under the weights before its step."""
    passes = build_rank_batch(record.episodes, trainer.settings(record), trainer.traits).passes
    logprobs = [_score(trainer, one, torch.from_numpy(one.temperatures)) for one in passes]
    warm = any((one.temperatures != 1).any() for one in passes)
    at_one = [_score(trainer, one, torch.ones(len(one.temperatures))) for one in passes] if warm else logprobs
    turns = [
        record.episodes[e].turns[t]
        for one in passes
        for e, t in zip(one.layout.episodes.tolist(), one.layout.turns.tolist(), strict=True)
    ]
    versions = np.concatenate([one.layout.versions for one in passes]).astype(np.int64)
    first = np.array([turn.versions[0].version if turn.versions else 0 for turn in turns])
    return Compared(
        logprobs=np.concatenate(logprobs),
        at_one=np.concatenate(at_one),
        behavior_logprobs=np.concatenate([one.layout.logprobs for one in passes]).astype(np.float64),
        lag=trainer.version - np.maximum(versions, 0),
        pushed=versions != first,
        repaired=np.array([turn.repaired for turn in turns]),
        held=np.array([bool(turn.sampling.grammar) for turn in turns]),
    )


def causes(batches: Sequence[Compared]) -> list[Cause]:
    """Return the mismatch of the batches' tokens by cause, beginning with tokens sampled under the same weights."""
    logprobs, behavior_logprobs, lag, pushed, repaired, held = (
        np.concatenate([getattr(each, name) for each in batches])
        for name in ("logprobs", "behavior_logprobs", "lag", "pushed", "repaired", "held")
    )
    pushed, repaired = pushed & ~held, repaired & ~held
    plain = ~pushed & ~repaired & ~held
    groups = {
        "arithmetic alone (same weights)": plain & (lag == 0),
        **{f"weights {count_of(n, 'step')} old": plain & (lag == n) for n in sorted({*lag[plain].tolist()} - {0})},
        "after a push in mid-answer": pushed & ~repaired,
        "repaired prompt": repaired,
        HELD: held,
    }
    return [_cause(name, logprobs[which] - behavior_logprobs[which]) for name, which in groups.items() if which.any()]


def explain(batches: Sequence[Compared]) -> Iterator[Finding]:
    """Yield one finding per cause and, if there is a mismatch even under the same weights, a finding that names its source."""
    found = causes(batches)
    same = next((cause for cause in found if cause.name.startswith("arithmetic")), None)
    for cause in found:
        level: Level = "ok"
        if cause.name == HELD:
            pass  # expected; docs/explanation/learning/assumptions.md describes the effect on training
        elif cause.k3 > BROKEN or math.isnan(cause.k3):
            level = "error" if cause is same else "warning"
        elif cause.k3 > SAME_WEIGHTS_LIMIT:
            level = "warning" if cause is same else "note"
        yield Finding(
            level=level,
            check=f"mismatch: {cause.name}",
            text=f"{count_of(cause.tokens, 'token')}, k3 {cause.k3:.2g}, mean gap {cause.mean_gap:+.2g}, p99 |gap| {cause.p99:.2g}",
        )
    if same is None:
        yield Finding(
            level="note",
            check="mismatch: arithmetic alone (same weights)",
            text="no stored token was sampled with the weights of a checkpoint, so arithmetic cannot be compared",
        )
    elif same.k3 > SAME_WEIGHTS_LIMIT:
        yield from _find_suspects(batches, same)


def certify_fp8(batches: Sequence[Compared], ratio_cap: float) -> Finding:
    """Judge whether importance ratios truncated at `ratio_cap` correct an FP8 engine's log-probabilities, by the tokens that were
    sampled with the learner's own weights."""
    check = "FP8 rollouts"
    gaps = [(b.logprobs - b.behavior_logprobs)[(b.lag == 0) & ~b.pushed & ~b.repaired & ~b.held] for b in batches]
    gap = np.concatenate(gaps)
    if not len(gap):
        text = "no stored token was sampled with the weights of a checkpoint, so nothing is certified: train a few more steps"
        return Finding(level="note", check=check, text=text)
    k3 = _cause("", gap).k3
    ratios = np.minimum(np.exp(np.minimum(gap, 20.0)), ratio_cap)
    effective = float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))
    cut = float(np.mean(ratios >= ratio_cap))
    measured = f"k3 {k3:.2g} (limit {BROKEN:g}), effective samples {effective:.1%} (limit {MIN_EFFECTIVE:.0%}), {cut:.2%} of ratios cut"
    return judge_value(
        check,
        bad=not (k3 <= BROKEN and effective >= MIN_EFFECTIVE),  # also true for NaN
        ok=f"certified on {len(gap)} tokens: {measured}",
        wrong=f"truncated importance sampling does not correct this engine: {measured}; set engine.quantization = 'none' and "
        "engine.kv_cache_dtype = 'auto'",
    )


def _find_suspects(batches: Sequence[Compared], same: Cause) -> Iterator[Finding]:
    logprobs, at_one, behavior_logprobs, lag, held = (
        np.concatenate([getattr(each, name) for each in batches])
        for name in ("logprobs", "at_one", "behavior_logprobs", "lag", "held")
    )
    now = (lag == 0) & ~held
    raw = _cause("", at_one[now] - behavior_logprobs[now])
    if raw.k3 < EXPLAINS * same.k3:
        text = f"k3 is {raw.k3:.2g} at temperature 1: the engine reports raw log-probabilities; start it with --logprobs-mode processed_logprobs"
        yield Finding(level="error", check="cause: temperature", text=text)
    elif np.quantile(logprobs[now] - behavior_logprobs[now], 0.9) < 0:
        text = (
            "nearly every token is likelier in the engine than in the learner: the engine samples from a part of the "
            "vocabulary (top-p, top-k, min-p, penalties); serve with --generation-config vllm and without these parameters"
        )
        yield Finding(level="error", check="cause: truncated support", text=text)
    elif same.k3 > BROKEN:
        text = "the engine serves other weights than its version says, or another model or tokenizer: restart it and compare model folders"
        yield Finding(level="error", check="cause: other weights", text=text)
    else:
        text = "BF16 or FP8 in the engine explains a mismatch of this size: serve in BF16 or FP32, or set ratio_band"
        yield Finding(level="warning", check="cause: precision", text=text)


def _cause(name: str, gap: Floats) -> Cause:
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.exp(np.minimum(gap, 20.0)) - gap - 1))
    return Cause(
        name=name,
        tokens=len(gap),
        k3=k3,
        mean_gap=float(gap.mean()),
        p99=float(np.quantile(np.abs(gap), 0.99)),
    )


def _score(trainer: Trainer, one: MicroBatch, temperatures: torch.Tensor) -> Floats:
    device = trainer.accelerator.device
    with torch.no_grad():
        scored = trainer.model(PlacedLayout.of(one.layout, device), temperatures.to(device)).logprobs
    values: Floats = scored.double().cpu().numpy()
    return values
