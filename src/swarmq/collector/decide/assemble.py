"""The decision which turns of a finished episode are trained, and the rollout built from them.

Exactly those calls are trained whose answers the agent received. A recorded turn is no proof, because its proxy may have been
killed, or may have answered 503, before the last byte. A turn is kept if one of these proofs holds, tried in this order:

(a) `end.calls` names all answered calls: these are kept, and nothing else;
(b) `end.received` names the call. A call that the client watched (`observed`) and does not name was not received;
(c) a later prompt continues the turn, so the agent had its answer. To continue means to contain sampled tokens of it: a turn that
    shares only the prompt is another choice or repetition of the request, or a conversation with the same beginning;
(d) its proxy reports that the answer was sent (`DeliveryReport`), or comes from a version without such reports (`receipt` is false).

While a call has neither proof nor report, the decision waits. An answer that was sent can still be lost on its way. The client
library then repeats the request, which reveals that the earlier answer was lost:

(e) a repetition with a higher retry number replaces one earlier request: preferably one whose answer is known as lost, else one
    that no turn continues;
(f) if a later prompt continues one of two equal requests with equal retry numbers, and none continues the other, the other's
    answer was lost. This holds only for libraries that do not count retries; a library that counts them sends 0 for a new request.

Rules (e) and (f) never remove a call that the client names. A kept turn may share tokens with an orphan, or with another
policy's turn; it is then re-based on the nearest ancestor in the rollout, so that every turn can be resolved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

import msgspec

from swarmq.collector.decide.state import TurnMeta
from swarmq.messages import MAX_MESSAGE_BYTES, EpisodeBegin, EpisodeEnd, Message, Rollout, Turn

ENVELOPE_BYTES = 64 * 1024
"""Bytes reserved for a rollout's fields besides its turns and the fields of its end."""

_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
"""Decoder for message bodies that were checked on arrival."""

MAX_NAMED_CALLS = 3
"""Maximum number of unknown call ids that one warning lists."""


class ReceivedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about which answers of an episode's model calls were received. Calls in neither set were not."""

    kept: set[str]
    """Ids of calls whose answers the agent received."""
    awaited: set[str]
    """Ids of calls without proof or report so far. They count as not received if no report arrives in time."""


def decide_received(
    calls: Mapping[str, TurnMeta],
    named: Collection[str] | None = None,
    received: Collection[str] | None = None,
    *,
    sent: AbstractSet[str] = frozenset(),
    withdrawn: AbstractSet[str] = frozenset(),
) -> ReceivedCalls:
    """Decide which calls were received. `named` and `received` are the fields `calls` and `received` of the end; `sent` and
    `withdrawn` are the call ids of delivery reports."""
    if named is not None:
        return ReceivedCalls(kept=set(named) & calls.keys(), awaited=set())
    continued = {
        call.parent
        for call in calls.values()
        if call.parent is not None and call.parent in calls and call.shared > calls[call.parent].prompt
    }
    proven = calls.keys() & (received or ())
    lost = calls.keys() & withdrawn - continued
    if received is not None:
        lost |= {call.call_id for call in calls.values() if call.observed}
    lost -= proven
    for requests in _equal_requests(calls.values()):
        lost |= {call.call_id for call in _find_repeated(requests, continued, lost, proven)}
    known = {call.call_id for call in calls.values() if not call.receipt} | continued | sent | proven
    return ReceivedCalls(kept=calls.keys() & known - lost, awaited=calls.keys() - known - lost)


def find_flaw(calls: Mapping[str, TurnMeta], kept: Collection[str]) -> Literal["incomplete", "unresolvable"] | None:
    """Return why a kept prompt cannot be assembled from `calls`: a turn is missing (`incomplete`), or references contradict
    each other (`unresolvable`). Return None if it can."""
    sound: set[str] = set()
    for call_id in kept:
        path: set[str] = set()
        call = calls[call_id]
        while call.parent is not None and call.call_id not in sound:
            path.add(call.call_id)
            if call.parent in path:
                return "unresolvable"
            parent = calls.get(call.parent)
            if parent is None:
                return "incomplete"
            if call.shared > parent.prompt + parent.sampled:
                return "unresolvable"
            call = parent
        sound |= path
    return None


def fits_message(calls: Mapping[str, TurnMeta], kept: Collection[str], end_bytes: int) -> bool:
    """Return whether the kept turns fit into one message, including the worst case of re-basing."""
    own = sum(calls[call_id].size_bytes for call_id in kept)
    orphans = [calls[call_id] for call_id in kept if calls[call_id].parent not in kept]
    images = sum(call.image_bytes for call in calls.values() if call.call_id not in kept)
    rebased = sum(call.token_bytes * call.shared + (images if call.shared else 0) for call in orphans)
    return own + rebased + end_bytes + ENVELOPE_BYTES <= MAX_MESSAGE_BYTES


def find_uncredited_rewards(
    calls: Mapping[str, TurnMeta], end: EpisodeEnd, kept: AbstractSet[str]
) -> dict[tuple[str, str], str]:
    """Return (policy, agent tag) -> warning for each reward by agent tag that credits no call. Rewards by call id that credit none
    are under ("", call id): one warning for missing calls and one for unreceived calls, each under its first call id."""
    found = {}
    if lost := sorted((end.call_rewards.keys() & calls.keys()) - kept):
        found["", lost[0]] = (
            f"call_rewards of episode {end.episode_id} names {_join_names(lost)}, a call whose answer its agent did not receive: it "
            "is not trained, and the reward credits nothing"
        )
    if unknown := sorted(end.call_rewards.keys() - calls.keys()):
        example = f", e.g. {next(iter(calls))!r}" if calls else ""
        found["", unknown[0]] = (
            f"call_rewards of episode {end.episode_id} names {_join_names(unknown)}, an id that no call of it has: give the `id` of the answer "
            f"(header x-swarmq-call-id){example}. Calls without a reward of their own get their tag's or the episode's"
        )
    for policy, rewards in end.agent_rewards.items():
        tags = sorted({call.agent for call in calls.values() if call.policy == policy and call.agent})
        for agent in rewards.keys() - tags:
            known = f"its calls are tagged {', '.join(tags)}" if tags else "none of its calls has a tag"
            found[policy, agent] = (
                f"agent_rewards of {policy} names {agent!r}, but no call of episode {end.episode_id} has this tag "
                f"(header x-swarmq-agent); {known}. Calls without a reward for their tag get the episode's"
            )
    return found


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:MAX_NAMED_CALLS])) + (
        f" and {len(names) - MAX_NAMED_CALLS} more" if names[MAX_NAMED_CALLS:] else ""
    )


def assemble_rollout(
    policy: str, begin: EpisodeBegin, end: EpisodeEnd, turns: Sequence[Turn], *, group_members: int, term: int = 0
) -> Rollout:
    """Build the rollout of one policy. Pure: the same stored rows always give the same bytes."""
    by_id = {turn.call_id: turn for turn in turns}
    if end.calls is not None:
        kept = set(end.calls) & by_id.keys()
    else:
        kept = decide_received({turn.call_id: TurnMeta.of(turn, 0) for turn in turns}, None, end.received).kept
    sent = {call_id for call_id in kept if by_id[call_id].policy == policy}
    return Rollout(
        run=begin.run,
        policy=policy,
        episode_id=begin.episode_id,
        slot=begin.slot,
        kind=begin.kind,
        group_id=begin.slot.group_id,
        group_members=group_members,
        group_size=begin.group_size,
        reward=end.rewards[policy],
        agent_rewards=end.agent_rewards.get(policy, {}),
        call_rewards={call_id: reward for call_id, reward in end.call_rewards.items() if call_id in sent},
        uncredited={call_id: reward for call_id, reward in end.call_rewards.items() if call_id not in kept},
        success=end.success,
        metrics=end.metrics,
        metadata=end.metadata,
        client_id=begin.client_id,
        code_version=begin.code_version,
        attempt=begin.attempt,
        orphan_turns=sum(turn.policy == policy and turn.call_id not in kept for turn in turns),
        term=term,
        turns=tuple(_rebase(turn, by_id, sent) for turn in turns if turn.call_id in sent),
    )


class StoredRollout(msgspec.Struct, frozen=True, array_like=True):
    """The messages of an episode as they arrived, from which the rollout of one policy is assembled."""

    policy: str
    group_members: int
    term: int
    begin: bytes
    end: bytes
    turns: list[bytes]

    def assemble(self) -> Rollout:
        """Return the message for the policy's learner."""
        parts = decode_parts(self.begin, self.end, self.turns)
        return assemble_rollout(self.policy, *parts, group_members=self.group_members, term=self.term)


def decode_parts(begin: bytes, end: bytes, turns: Sequence[bytes]) -> tuple[EpisodeBegin, EpisodeEnd, list[Turn]]:
    """Decode the stored messages of an episode; `turns` may contain delivery reports, too."""
    began, ended = _messages.decode(begin), _messages.decode(end)
    assert isinstance(began, EpisodeBegin) and isinstance(ended, EpisodeEnd)  # noqa: PT018
    return began, ended, [turn for body in turns if isinstance(turn := _messages.decode(body), Turn)]


def _rebase(turn: Turn, by_id: Mapping[str, Turn], sent: Collection[str]) -> Turn:
    """Return the turn with its prompt as an extension of its nearest ancestor in `sent`."""
    parent, shared, prompt_ids = turn.parent, turn.shared, turn.prompt_ids
    images, routed = turn.images, turn.routed_experts
    while parent is not None and parent not in sent:
        lost = by_id[parent]
        if shared > lost.shared:
            own = lost.prompt_ids + lost.sampled_ids
            prompt_ids = own[: 4 * (shared - lost.shared)] + prompt_ids
            images = (*(image for image in lost.images if image.offset < shared), *images)
            known = shared - max(lost.shared, 1)
            above = lost.first_routed(known)
            routed = above + routed if above or not known else b""
            shared = lost.shared
        parent = lost.parent
    if parent == turn.parent:
        return turn
    return msgspec.structs.replace(
        turn, parent=parent, shared=shared, prompt_ids=prompt_ids, images=images, routed_experts=routed
    )


def _equal_requests(calls: Collection[TurnMeta]) -> list[list[list[TurnMeta]]]:
    """Return the requests that were sent several times: for each request its repetitions in order of arrival, and for each
    repetition its choices."""
    digests = [call.request_digest for call in calls if call.request_digest]
    if len(set(digests)) == len(digests):  # nearly always, and found sooner than by what follows
        return []
    equal: dict[tuple[str, str, str | None], dict[str, list[TurnMeta]]] = defaultdict(dict)
    for call in calls:
        if call.request_digest:
            requests = equal[call.policy, call.request_digest, call.agent]
            requests.setdefault(call.request_id, []).append(call)
    return [list(requests.values()) for requests in equal.values() if len(requests) > 1]


def _find_repeated(
    requests: list[list[TurnMeta]], continued: AbstractSet[str], known: AbstractSet[str], proven: AbstractSet[str]
) -> list[TurnMeta]:
    """Return the calls whose answers were lost, as the repetitions of a request reveal.

    `continued`: calls that a later prompt continues. `known`: calls whose answers are already known as lost. `proven`: calls whose
    answers the client saw arrive.
    """
    lost = _find_retried(requests, continued, known, proven)
    lost += _find_abandoned([choices for choices in requests if choices not in lost], continued, proven)
    return [call for choices in lost for call in choices]


def _find_retried(
    requests: list[list[TurnMeta]], continued: AbstractSet[str], known: AbstractSet[str], proven: AbstractSet[str]
) -> list[list[TurnMeta]]:
    """Apply rule (e): return the repetitions of a request that a later retry replaced. The last retry replaces all before it."""
    lost: set[int] = set()
    for last in sorted(range(len(requests)), key=lambda n: -requests[n][0].retry):
        if last in lost:
            continue
        for retry in range(requests[last][0].retry):
            earlier = [
                n
                for n, choices in enumerate(requests)
                if n not in lost and choices[0].retry == retry and not _has(choices, proven)
            ]
            if earlier:
                _, n = max(((_has(requests[n], known), not _has(requests[n], continued), n < last), n) for n in earlier)
                lost.add(n)
    return [requests[n] for n in lost]


def _find_abandoned(
    requests: list[list[TurnMeta]], continued: AbstractSet[str], proven: AbstractSet[str]
) -> list[list[TurnMeta]]:
    """Apply rule (f): return the repetitions that no turn continues, although an equal repetition with the same retry number
    is continued."""
    live = {choices[0].retry for choices in requests if _has(choices, continued)}
    return [
        choices
        for choices in requests
        if choices[0].retry in live and not choices[0].counts_retries and not _has(choices, continued | proven)
    ]


def _has(choices: Sequence[TurnMeta], ids: AbstractSet[str]) -> bool:
    return any(call.call_id in ids for call in choices)
