"""Turns: every sampled choice is confirmed by the broker before its agent gets the end of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from swarmq.broker import topology
from swarmq.errors import EngineAnswerError, MessageError
from swarmq.messages import (
    Event,
    Message,
    Sampling,
    Timings,
    Turn,
    VersionSpan,
    are_valid_logprobs,
    check,
    pack_floats,
    pack_ids,
    unpack_floats,
)
from swarmq.proxy.counters import Meter
from swarmq.proxy.episodes.conversation_graph import (
    ID_BYTES,
    Graph,
    History,
    Node,
    Origin,
    Stitched,
    answer_of,
    digest,
    next_key,
)

Json = dict[str, Any]

MAX_READABLE_BYTES = 1024 * 1024
"""Messages beyond this (images) are left out of a turn; nothing computes with them."""


class Publisher(Protocol):
    """What the proxy needs of a broker."""

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None: ...

    async def emit(self, event: Event) -> bool: ...


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the turns of one request have in common."""

    run: str
    episode_id: str
    policy: str
    mode: str
    request_id: str
    retry: int
    counts_retries: bool = False
    observed: bool = False
    request_digest: str
    agent: str | None
    client_id: str
    kind: str
    messages: list[Json]
    history: History
    stitched: Stitched
    fresh: bytes
    sampling: Sampling


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One complete choice."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    message: Json
    cut: bool = False
    """The message lacks a stop string that was sampled."""
    timings: Timings


class Recorder:
    def __init__(self, broker: Publisher, meter: Meter, *, confirm_timeout_s: float) -> None:
        self._broker = broker
        self._meter = meter
        self._confirm_timeout_s = confirm_timeout_s

    async def record(self, asked: Asked, sampled: Sampled, graph: Graph) -> None:
        """Return once the turn is durable. Raises BrokerError when that takes too long, EngineAnswerError for a bad answer."""
        origin = graph.origin(asked.stitched, asked.history, asked.request_id)
        turn = turn_of(asked, sampled, origin)
        _check(turn)
        sampled_at = time.monotonic()
        await self._broker.publish(topology.inbox(asked.run), turn, deadline_s=self._confirm_timeout_s)
        node = node_of(asked, sampled, turn, origin)
        graph.add(node, asked.stitched, asked.history)  # only now: a parent must exist for the collector
        self._meter.take(turn, time.monotonic() - sampled_at, kind=asked.kind)


def _check(turn: Turn) -> None:
    """Refuse now what a reader of the queue would have to refuse, and could tell nobody of."""
    if not turn.sampled_ids:
        raise EngineAnswerError("empty", f"turn {turn.call_id} was ended without a single token")
    try:
        check(turn)
    except MessageError as error:
        impossible = not are_valid_logprobs(*unpack_floats(turn.logprobs))
        raise EngineAnswerError("logprobs" if impossible else "malformed", str(error)) from error


def turn_of(asked: Asked, sampled: Sampled, origin: Origin) -> Turn:
    stitched = asked.stitched
    return Turn(
        run=asked.run,
        episode_id=asked.episode_id,
        policy=asked.policy,
        call_id=call_id(asked.request_id, sampled.index),
        mode="eval" if asked.mode == "eval" else "train",
        request_id=asked.request_id,
        retry=asked.retry,
        counts_retries=asked.counts_retries,
        receipt=asked.mode != "eval",
        observed=asked.observed,
        request_digest=asked.request_digest,
        parent=origin.node.call_id if origin.node else None,
        shared=origin.shared,
        begins=origin.begins,
        prompt_ids=stitched.prompt[origin.shared * ID_BYTES :],
        sampled_ids=pack_ids(sampled.token_ids),
        logprobs=pack_floats(sampled.logprobs),
        versions=sampled.versions,
        sampling=asked.sampling,
        finish_reason=sampled.finish_reason,
        agent=asked.agent,
        client_id=asked.client_id,
        branch=stitched.branch,
        repaired=stitched.repaired,
        timings=sampled.timings,
        messages=_readable([*asked.messages[origin.depth :], sampled.message]),
    )


def node_of(asked: Asked, sampled: Sampled, turn: Turn, origin: Origin) -> Node:
    """The turn as later requests may continue it."""
    message = sampled.message
    return Node(
        call_id=turn.call_id,
        request_id=turn.request_id,
        key=next_key(asked.history.keys[-1], message),
        base=asked.history.base,
        answer=answer_of(message),
        depth=len(asked.messages) + 1,
        parent=origin.node,
        shared=turn.shared,
        prompt=turn.prompt_ids,
        sampled=turn.sampled_ids,
        repaired=asked.stitched.repaired,
        fresh_bytes=len(asked.fresh),
        fresh_digest=digest(asked.fresh),
        cut=sampled.cut,
    )


def call_id(request_id: str, index: int) -> str:
    return f"{request_id}.{index}"


def _readable(messages: list[Json]) -> bytes:
    raw = msgspec.json.encode(messages)
    return raw if len(raw) <= MAX_READABLE_BYTES else msgspec.json.encode(messages[-1:])
