"""Recording of turns: the broker confirms every sampled choice before its agent gets the end of it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from swarmq.broker import topology
from swarmq.errors import EngineAnswerError, MessageError
from swarmq.messages import (
    Event,
    Message,
    Turn,
    are_valid_logprobs,
    check,
    pack_floats,
    pack_ids,
    unpack_floats,
)
from swarmq.proxy.counters import Counters
from swarmq.proxy.episodes.conversation_graph import ID_BYTES, Graph, Origin, TurnNode, digest, hash_answer, next_key
from swarmq.proxy.requests import ChoiceResult, RequestContext

Json = dict[str, Any]

MAX_READABLE_BYTES = 1024 * 1024
"""Maximum bytes of the messages in a turn. Larger ones (images) are left out, because they are only for display."""


MAX_URL = 200
"""Maximum number of characters of an image's URL that is kept as it is in a trained turn's messages."""
URL_SHOWN = 40


class TurnPublisher(Protocol):
    """The broker, as far as the proxy uses it."""

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None: ...

    async def emit(self, event: Event) -> bool: ...


class Recorder:
    def __init__(
        self, broker: TurnPublisher, meter: Counters, *, confirm_timeout_s: float, turn_queues: int = 0
    ) -> None:
        """`turn_queues`: number of queues among which turns are divided; without any, turns go to the inbox."""
        self._broker = broker
        self._meter = meter
        self._confirm_timeout_s = confirm_timeout_s
        self._turn_queues = turn_queues

    async def record(self, request: RequestContext, choice: ChoiceResult, graph: Graph, *, kind: str) -> None:
        """Record a choice and return once its turn is durable. Raises BrokerError if that takes too long, EngineAnswerError for
        an unusable answer."""
        origin = graph.origin(request.stitched, request.history, request.request_id)
        turn = build_turn(request, choice, origin)
        _check(turn)
        sampled_at = time.monotonic()
        queue = topology.turns_of(turn.run, turn.episode_id, self._turn_queues)
        await self._broker.publish(queue, turn, deadline_s=self._confirm_timeout_s)
        node = build_node(request, choice, turn, origin)
        graph.add(node, request.stitched, request.history)  # the collector must have a turn before others refer to it
        graph.image_bytes += sum(len(image.patches) for image in turn.images)
        self._meter.take(turn, time.monotonic() - sampled_at, kind=kind)


def _check(turn: Turn) -> None:
    """Raise EngineAnswerError if the queue's readers would refuse the turn, while the agent can still get an error."""
    if not turn.sampled_ids:
        raise EngineAnswerError("empty", f"turn {turn.call_id} was ended without a single token")
    try:
        check(turn)
    except MessageError as error:
        impossible = not are_valid_logprobs(*unpack_floats(turn.logprobs))
        raise EngineAnswerError("logprobs" if impossible else "malformed", str(error)) from error


def build_turn(request: RequestContext, choice: ChoiceResult, origin: Origin) -> Turn:
    stitched = request.stitched
    turn = Turn(
        run=request.claims.run,
        episode_id=request.claims.episode_id,
        policy=request.policy,
        call_id=request.call_id(choice.index),
        mode="eval" if request.claims.mode == "eval" else "train",
        request_id=request.request_id,
        retry=request.retry,
        counts_retries=request.counts_retries,
        receipt=request.claims.mode != "eval",
        observed=request.observed,
        request_digest=request.request_digest,
        parent=origin.node.call_id if origin.node else None,
        shared=origin.shared,
        begins=origin.begins,
        prompt_ids=stitched.prompt[origin.shared * ID_BYTES :],
        images=tuple(image for image in request.images if image.offset >= origin.shared),
        sampled_ids=pack_ids(choice.token_ids),
        logprobs=pack_floats(choice.logprobs),
        versions=choice.versions,
        sampling=request.sampling,
        finish_reason=choice.finish_reason,
        agent=request.agent,
        client_id=request.claims.client,
        branch=stitched.branch,
        repaired=stitched.repaired,
        timings=choice.timings,
        messages=_readable([*request.messages[origin.depth :], choice.message], shorten=bool(stitched.images)),
    )
    if choice.routed_experts is None:
        return turn
    return msgspec.structs.replace(turn, routed_experts=choice.routed_experts.of_last(turn.num_routed))


def build_node(request: RequestContext, choice: ChoiceResult, turn: Turn, origin: Origin) -> TurnNode:
    """Return the turn's node, which later requests may continue."""
    message = choice.message
    return TurnNode(
        call_id=turn.call_id,
        request_id=turn.request_id,
        key=next_key(request.history.keys[-1], message),
        base=request.history.base,
        answer=hash_answer(message),
        depth=len(request.messages) + 1,
        parent=origin.node,
        shared=turn.shared,
        prompt=turn.prompt_ids,
        sampled=turn.sampled_ids,
        images=tuple(place for place in request.stitched.images if place[0] >= turn.shared),
        repaired=request.stitched.repaired,
        fresh_bytes=len(request.fresh),
        fresh_digest=digest(request.fresh),
        cut=choice.is_cut,
    )


def _readable(messages: list[Json], *, shorten: bool) -> bytes:
    """Return the messages as JSON. `shorten`: cut the content of images, which the turn has as pixels."""
    if shorten:
        messages = [{**message, "content": _shorten(message.get("content"))} for message in messages]
    raw = msgspec.json.encode(messages)
    return raw if len(raw) <= MAX_READABLE_BYTES else msgspec.json.encode(messages[-1:])


def _shorten(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {**part, "image_url": {"url": _shorten_url(str(url))}}
        if isinstance(part, dict) and isinstance(image := part.get("image_url"), dict) and (url := image.get("url"))
        else part
        for part in content
    ]


def _shorten_url(url: str) -> str:
    return url if len(url) <= MAX_URL else f"{url[:URL_SHOWN]}... ({len(url)} characters)"
