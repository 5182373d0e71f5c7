"""Resolves turns into whole token sequences, because a turn is sent with its new tokens only.

A turn carries the tokens that its prompt added and the number of tokens that it shares with its parent. The turns of a chat that
only grows are prefixes of one buffer, so memory and time grow with the episode's tokens and not with turns x tokens. A fork
copies the tokens that it shares. The same holds for the experts to which an engine routed the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmq.errors import TimelineError
from swarmq.messages import Turn
from swarmq.timeline.images import ImageTable

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
RoutingArray = NDArray[np.uint8]


class ResolvedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as a whole token sequence: a prompt of P tokens, followed by A sampled tokens."""

    token_ids: IntArray  # [P + A] with the marks of an `ImageTable` in place of placeholder tokens
    prompt_length: int  # P, at least 1
    logprobs: FloatArray  # [A] natural log under the weights and parameters that sampled
    versions: IntArray  # [A] weight version that sampled the token
    routing: RoutingArray | None = (
        None  # [P + A, bytes] packed expert ids; zeros for a last token that no turn continues
    )
    parent: int = -1
    """Index of a turn in the same list whose first `shared` tokens are known to be equal; -1 for none."""
    shared: int = 0

    @property
    def prompt_ids(self) -> IntArray:
        return self.token_ids[: self.prompt_length]

    @property
    def sampled_ids(self) -> IntArray:
        return self.token_ids[self.prompt_length :]

    def __len__(self) -> int:
        return len(self.token_ids)


def resolve(
    turns: Sequence[Turn],
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
    images: ImageTable | None = None,
    routing: bool = False,
) -> list[ResolvedTurn]:
    """Return the turns of one episode and policy, in their order, each with its full prompt: what it shares with its parent is filled in.

    `images`: table to which the turns' images are added, and whose marks replace placeholder tokens; None keeps the tokens.
    `routing`: whether turns have the recorded experts of their tokens.

    Raises TimelineError, whose `reason` is one of `duplicate_call`, `parent_unknown`, `parent_cycle`, `shared_beyond_parent`,
    `empty_prompt`, `nothing_sampled`, `over_budget` (longer than `max_length`), `id_outside_vocabulary`, `logprob_missing`,
    `logprob_not_finite`, `version_missing`, `routing_missing` (a turn without experts, or with another number of them for each token).
    """
    parents = _find_parents(turns)
    lengths = _measure_lengths(turns, parents, max_length)
    for turn in turns:
        _check_ids(turn, vocab_size)
    chains = list(_order_chains(turns, parents, lengths))
    sequences = _build_sequences(turns, parents, lengths, chains, images)
    routings = _build_routings(turns, parents, lengths, chains) if routing else [None] * len(turns)
    return [
        ResolvedTurn(
            token_ids=sequence,
            prompt_length=len(sequence) - turn.num_sampled,
            logprobs=_decode_logprobs(turn),
            versions=_expand_versions(turn),
            routing=routing,
            parent=parent,
            shared=turn.shared,
        )
        for turn, parent, sequence, routing in zip(turns, parents, sequences, routings, strict=True)
    ]


def make_resolved_turn(
    prompt_ids: Sequence[int] | IntArray,
    sampled_ids: Sequence[int] | IntArray,
    logprobs: Sequence[float] | FloatArray,
    version: int = 0,
) -> ResolvedTurn:
    """Build a turn from whole token sequences, for data that was never sent as messages (benchmarks, replays of plain text)."""
    prompt, sampled = np.asarray(prompt_ids, np.int32), np.asarray(sampled_ids, np.int32)
    return ResolvedTurn(
        token_ids=np.concatenate([prompt, sampled]),
        prompt_length=len(prompt),
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.full(len(sampled), version, np.int32),
    )


def _find_parents(turns: Sequence[Turn]) -> list[int]:
    index: dict[str, int] = {}
    for i, turn in enumerate(turns):
        if turn.call_id in index:
            raise _make_error("duplicate_call", turn, "the episode has two turns with this call id")
        index[turn.call_id] = i
    for turn in turns:
        if turn.parent is not None and turn.parent not in index:
            raise _make_error("parent_unknown", turn, f"its parent {turn.parent} is not among the episode's turns")
    return [-1 if turn.parent is None else index[turn.parent] for turn in turns]


def _measure_lengths(turns: Sequence[Turn], parents: Sequence[int], max_length: int | None) -> list[int]:
    lengths = [turn.num_prompt + turn.num_sampled for turn in turns]
    for turn, parent, length in zip(turns, parents, lengths, strict=True):
        available = lengths[parent] if parent >= 0 else 0
        if not 0 <= turn.shared <= available:
            raise _make_error(
                "shared_beyond_parent", turn, f"shares {turn.shared} tokens of a parent that has {available}"
            )
        if not turn.sampled_ids:
            raise _make_error("nothing_sampled", turn, "no sampled tokens, so nothing to learn from")
        if length == turn.num_sampled:
            raise _make_error(
                "empty_prompt", turn, "its prompt is empty, so its first sampled token cannot be predicted"
            )
        if max_length is not None and length > max_length:
            raise _make_error(
                "over_budget",
                turn,
                f"{length} tokens are more than the {max_length} of one pass, the limit set by train.micro_batch_tokens and the model's context",
            )
    return lengths


def _order_chains(turns: Sequence[Turn], parents: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the turns as chains that share one buffer, each after its first turn's parent. The first turn that continues its parent's
    whole sequence is in the parent's chain."""
    continuations: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for i, (turn, parent) in enumerate(zip(turns, parents, strict=True)):
        if parent >= 0 and parent not in continuations and turn.shared == lengths[parent]:
            continuations[parent] = i
        else:
            children.setdefault(parent, []).append(i)
    heads, seen = list(reversed(children.get(-1, []))), set[int]()
    while heads:
        chain = [heads.pop()]
        while chain[-1] in continuations:
            chain.append(continuations[chain[-1]])
        yield chain
        seen.update(chain)
        for i in chain:
            heads.extend(reversed(children.get(i, [])))
    if len(seen) < len(turns):
        lost = next(turn for i, turn in enumerate(turns) if i not in seen)
        raise _make_error("parent_cycle", lost, "is its own ancestor")


def _build_sequences(
    turns: Sequence[Turn],
    parents: Sequence[int],
    lengths: Sequence[int],
    chains: Sequence[Sequence[int]],
    images: ImageTable | None,
) -> list[IntArray]:
    """Return the whole token sequences."""
    sequences: list[IntArray] = [np.empty(0, np.int32)] * len(turns)
    for chain in chains:
        first = chain[0]
        buffer = np.empty(lengths[chain[-1]], np.int32)
        if parents[first] >= 0:
            buffer[: turns[first].shared] = sequences[parents[first]][: turns[first].shared]
        for i in chain:
            buffer[turns[i].shared : lengths[i]] = np.frombuffer(turns[i].prompt_ids + turns[i].sampled_ids, "<i4")
            if images is not None:
                for image in turns[i].images:
                    buffer[image.offset : image.offset + image.length] = images.mark(image)
            sequences[i] = buffer[: lengths[i]]
    return sequences


def _build_routings(
    turns: Sequence[Turn], parents: Sequence[int], lengths: Sequence[int], chains: Sequence[Sequence[int]]
) -> list[RoutingArray]:
    """Return the packed experts of all tokens of each turn.

    A token has the experts with which the token after it was sampled: a turn has the row of the last token before its own, and its
    parent's rows for those before.
    """
    width = len(turns[0].routed_experts) // max(turns[0].num_routed, 1) if turns else 0
    for turn in turns:
        if not width or len(turn.routed_experts) != width * turn.num_routed:
            size = len(turn.routed_experts)
            raise _make_error("routing_missing", turn, f"{size} bytes of routed experts for {turn.num_routed} tokens")
    routings: list[RoutingArray] = [np.empty((0, width), np.uint8)] * len(turns)
    for chain in chains:
        first = chain[0]
        buffer = np.zeros((lengths[chain[-1]], width), np.uint8)
        if parents[first] >= 0:
            buffer[: turns[first].shared] = routings[parents[first]][: turns[first].shared]
        for i in chain:
            own = np.frombuffer(turns[i].routed_experts, np.uint8).reshape(-1, width)
            buffer[lengths[i] - 1 - len(own) : lengths[i] - 1] = own
            routings[i] = buffer[: lengths[i]]
    return routings


def _check_ids(turn: Turn, vocab_size: int | None) -> None:
    own = np.frombuffer(turn.prompt_ids + turn.sampled_ids, "<i4")
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    if own.min() < 0 or own.max() > top:
        wrong = own[(own < 0) | (own > top)][0]
        raise _make_error("id_outside_vocabulary", turn, f"token id {wrong} is not in [0, {top}]")


def _decode_logprobs(turn: Turn) -> FloatArray:
    if len(turn.logprobs) != len(turn.sampled_ids):
        raise _make_error(
            "logprob_missing",
            turn,
            f"{turn.num_sampled} sampled tokens, {len(turn.logprobs) / 4:g} log-probabilities",
        )
    values = np.frombuffer(turn.logprobs, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise _make_error("logprob_not_finite", turn, f"log-probability {values[where]} at sampled token {where}")
    return values


def _expand_versions(turn: Turn) -> IntArray:
    """Return the weight version of each sampled token. An engine that never received weights reports none, which means
    version 0."""
    values = np.full(turn.num_sampled, -1 if turn.versions else 0, np.int32)
    for span in turn.versions:
        values[span.start : span.end] = span.version
    if values.min() < 0:
        where = int(np.flatnonzero(values < 0)[0])
        raise _make_error("version_missing", turn, f"no weight version for sampled token {where}")
    return values


def _make_error(reason: str, turn: Turn, what: str) -> TimelineError:
    return TimelineError(reason, f"turn {turn.call_id} of {turn.episode_id}: {what}")
