"""Checks of a job and its stored batches against the assumptions of the losses (docs/explanation/learning/assumptions.md). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from swarmq.config import Policy, Train
from swarmq.engine.server.arguments import find_reserved
from swarmq.learner.batching.micro_batches import MicroBatch, ModelProfile, build_rank_batch, count_credited_tokens
from swarmq.learner.batching.sampling_checks import find_altered_sampling
from swarmq.learner.health.findings import Finding, judge_value
from swarmq.learner.methods.credit import TurnAdvantages, compute_advantages, group_by_slot
from swarmq.learner.methods.loss_weights import token_weight
from swarmq.learner.store.records import BatchRecord
from swarmq.messages import Rollout, Turn, unpack_floats, unpack_ids
from swarmq.runtime.wording import count_of
from swarmq.token_drift import Drift

LOST_LIMIT = 0.05


def checks(policy: Policy, records: Sequence[BatchRecord], traits: ModelProfile, vocab: int) -> Iterator[Finding]:
    """Yield findings about the batches of one policy. `traits`, `vocab`: model profile and vocabulary size of its learner."""
    turns = [turn for record in records for episode in record.episodes for turn in episode.turns]
    yield _engine_arguments(policy)
    yield _check_sampling(turns)
    yield _logprobs(turns)
    yield _versions(turns)
    yield _token_ids(turns, vocab)
    yield _drift(turns)
    yield from _weights(records, traits)


def _engine_arguments(policy: Policy) -> Finding:
    given = find_reserved(policy.engine.arguments)
    check, ours = "engine reports what it samples", "engines that swarmq starts report processed log-probabilities"
    if given:
        text = f"policies.*.engine.arguments changes {', '.join(given)}: remove it"
        return Finding(level="error", check=check, text=text)
    if policy.engine.urls:
        text = (
            f"{ours}, under vLLM's own sampling defaults. If you started {', '.join(policy.engine.urls)} yourself, see "
            "`mismatch: arithmetic alone`: their settings are not known here"
        )
        return Finding(level="note", check=check, text=text)
    return Finding(level="ok", check=check, text=f"{ours}, under vLLM's own sampling defaults")


def _check_sampling(turns: Sequence[Turn]) -> Finding:
    found = Counter(setting for turn in turns for setting in find_altered_sampling(turn.sampling))
    bad = sum(bool(find_altered_sampling(turn.sampling)) for turn in turns)
    temperatures = Counter(t.sampling.temperature for t in turns)
    held = sum(bool(turn.sampling.grammar) for turn in turns)
    if held and not bad:
        return Finding(
            level="warning",
            check="whole distribution sampled",
            text=f"{held} of {len(turns)} turns were sampled under a grammar: the engine normalises log-probabilities over the "
            "tokens that the grammar allows, the learner over all, so the ratios are too small; use structured outputs in "
            "evaluation only, or let the reward judge the format",
        )
    return judge_value(
        "whole distribution sampled",
        bad=bad > 0,
        ok=f"no truncation, penalty or bias in any of {len(turns)} turns; temperatures {dict(temperatures)}",
        wrong=f"{bad} of {len(turns)} turns were not sampled from softmax(z / T) "
        f"({', '.join(found)}): no importance ratio corrects this",
    )


def _logprobs(turns: Sequence[Turn]) -> Finding:
    values = [value for turn in turns for value in unpack_floats(turn.logprobs)]
    zeros = sum(value == 0.0 for value in values) / max(len(values), 1)
    return judge_value(
        "log-probabilities are those of samples",
        bad=zeros > 0.5,
        ok=f"mean {np.mean(values or [0.0]):.3f}; {zeros:.1%} are exactly 0",
        wrong=f"{zeros:.0%} of the recorded log-probabilities are exactly 0: the engine answers greedily or reports none",
        level="warning",
    )


def _versions(turns: Sequence[Turn]) -> Finding:
    without = sum(not turn.versions for turn in turns)
    return judge_value(
        "every token names its weights",
        bad=without > 0,
        ok="each sampled token has a weight version",
        wrong=f"{without} of {len(turns)} turns carry no weight versions and count as sampled by version 0: "
        "use vLLM 0.30 to 0.33",
        level="warning",
    )


def _token_ids(turns: Sequence[Turn], vocab: int) -> Finding:
    beyond = sum(max([*unpack_ids(t.prompt_ids), *unpack_ids(t.sampled_ids)], default=0) >= vocab for t in turns)
    return judge_value(
        "same tokens in engine and learner",
        bad=beyond > 0,
        ok=f"all ids are below the learner's {vocab}",
        wrong=f"{count_of(beyond, 'turn has', 'turns have')} token ids beyond the learner's vocabulary of {vocab}: engine and learner load different models",
    )


def _drift(turns: Sequence[Turn]) -> Finding:
    """Warn if too many turns lost their recorded tokens to drift, so that their whole context is computed again. Repaired turns kept
    them."""
    drift = Drift.of(turns)
    return judge_value(
        "conversations go on token by token",
        bad=drift.lost > LOST_LIMIT,
        ok=f"of {drift.continued} turns that continue an earlier one, {drift.repaired} kept recorded tokens that a fresh rendering "
        f"would have changed; branches {drift.branches}",
        wrong=f"{drift.lost:.1%} of {drift.continued} turns could not continue an earlier turn although its history was not "
        f"edited (limit {LOST_LIMIT:.0%}), branches {drift.branches}: they are trained correctly, but recompute their whole context; "
        "docs/explanation/proxy.md, 'Branches', explains how to avoid it",
        level="warning",
    )


def _weights(records: Sequence[BatchRecord], traits: ModelProfile) -> Iterator[Finding]:
    """Check that folding, packing and division keep each sampled token exactly once, with the weight and advantage of its
    episode."""
    tokens = apart = 0
    for record in records:
        train = record.settings or Train()
        credit = compute_advantages(group_by_slot(record.episodes), train, record.baselines)
        laid = [
            key
            for one in build_rank_batch(record.episodes, train, traits, credit=credit).passes
            for key in _list_placed(one)
        ]
        wanted = set(_list_unfolded(record.episodes, train, credit))
        if len(laid) != len(wanted) or {key[:3] for key in laid} != {key[:3] for key in wanted}:
            yield Finding(
                level="error",
                check="each token trained once",
                text=f"batch {record.index.version}: {len(wanted)} sampled tokens are in {len(laid)} places; set "
                "train.layout = 'rows' and report it",
            )
            return
        tokens += len(laid)
        apart += len(set(laid) - wanted)
    yield Finding(
        level="ok",
        check="each token trained once",
        text=f"all {tokens} of {count_of(len(records), 'batch', 'batches')}",
    )
    yield judge_value(
        "weights are set before folding",
        bad=apart > 0,
        ok=f"weight and advantage of all {tokens} tokens are those of their episodes and calls",
        wrong=f"{apart} of {tokens} tokens have another weight or advantage than their episodes and calls: report it",
    )


Key = tuple[int, int, int, float, float]
"""(episode, turn, offset, weight, advantage) of a token."""


def _list_placed(one: MicroBatch) -> Iterator[Key]:
    layout = one.layout
    columns = (layout.episodes, layout.turns, layout.offsets, one.weights, one.advantages)
    return zip(*(column.tolist() for column in columns), strict=True)


def _list_unfolded(episodes: Sequence[Rollout], train: Train, credit: TurnAdvantages) -> Iterator[Key]:
    for e, episode in enumerate(episodes):
        tokens = count_credited_tokens(episode, credit)
        weight = token_weight(train.normalisation, episode_tokens=tokens, constant_length=train.constant_length)
        for t, (turn, value) in enumerate(zip(episode.turns, credit[episode.episode_id], strict=True)):
            for offset in range(len(turn.sampled_ids) // 4):
                own = 0.0 if value is None else weight
                yield e, t, offset, float(np.float32(own)), float(np.float32(value or 0.0))
