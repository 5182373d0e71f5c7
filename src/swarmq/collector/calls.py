"""Which turns of a finished episode are trained, and the `Episode` made of them.

Trained are exactly the calls whose answers the agent received. Where the client does not say which those were, a
retried call gives itself away, in this order (rabbitmq_notes 2.4):

(a) `end.calls` names the answered calls: nothing else is kept;
(b) the same request sent again with a higher retry number: its earlier sending was lost. One retry stands for one
    loss, so of several equal requests only one is taken out, rather one that nothing continues;
(c) two equal requests with equal retry numbers, where a later prompt continues one and none continues the other:
    the other was lost. (An agent that samples the same prompt often on purpose uses `n` or names its calls.)

To continue a call is to have sampled tokens of it: what shares no more than its prompt is another choice or sending of
its request, or a conversation that begins alike.

A kept turn may share tokens with an orphan, or with another policy's turn; it is then re-based on the nearest
ancestor that is sent along, so every turn that leaves here can be resolved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from swarmq.collector.records import Call
from swarmq.messages import MAX_MESSAGE_BYTES, Episode, EpisodeBegin, EpisodeEnd, Turn

ENVELOPE_BYTES = 64 * 1024
"""Room for an episode's own fields besides its turns and what its end brought."""

NAMED = 3
"""Unknown calls that a warning names."""


def answered(calls: Mapping[str, Call], named: Collection[str] | None) -> set[str]:
    """Ids of the calls whose answers the agent received; `named` is `EpisodeEnd.calls`."""
    if named is not None:
        return set(named) & calls.keys()
    continued = {
        call.parent
        for call in calls.values()
        if call.parent is not None and call.parent in calls and call.shared > calls[call.parent].prompt
    }
    orphans: set[str] = set()
    for requests in _equal_requests(calls.values()):
        lost = _retried(requests, continued)
        lost += _abandoned([choices for choices in requests if choices not in lost], continued)
        orphans |= {call.call_id for choices in lost for call in choices}
    return calls.keys() - orphans


def flaw(calls: Mapping[str, Call], kept: Collection[str]) -> Literal["incomplete", "unresolvable"] | None:
    """Why some kept prompt cannot be put together from `calls`: a turn is missing, or references contradict."""
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


def fits(calls: Mapping[str, Call], kept: Collection[str], end_bytes: int) -> bool:
    """Whether the kept turns make a message of allowed size, re-basing at its worst included."""
    own = sum(calls[call_id].size_bytes for call_id in kept)
    rebased = sum(4 * calls[call_id].shared for call_id in kept if calls[call_id].parent not in kept)
    return own + rebased + end_bytes + ENVELOPE_BYTES <= MAX_MESSAGE_BYTES


def misnamed(calls: Mapping[str, Call], end: EpisodeEnd) -> dict[tuple[str, str], str]:
    """Policy and agent tag of every reward that credits no call, with what to say about it; rewards by call are told of
    together, under the first such id and no policy."""
    found = {}
    if unknown := sorted(end.call_rewards.keys() - calls.keys()):
        names = ", ".join(map(repr, unknown[:NAMED])) + (f" and {len(unknown) - NAMED} more" if unknown[NAMED:] else "")
        example = f", e.g. {next(iter(calls))!r}" if calls else ""
        found["", unknown[0]] = (
            f"call_rewards of episode {end.episode_id} names {names}, an id that no call of it has: give the `id` of the answer "
            f"(header x-swarmq-call-id){example}. Calls without a reward by call get their tag's or the episode's"
        )
    for policy, rewards in end.agent_rewards.items():
        tags = sorted({call.agent for call in calls.values() if call.policy == policy and call.agent})
        for agent in rewards.keys() - tags:
            known = f"its calls are tagged {', '.join(tags)}" if tags else "none of its calls has a tag"
            found[policy, agent] = (
                f"agent_rewards of {policy} names {agent!r}, as which no call of episode {end.episode_id} is tagged "
                f"(header x-swarmq-agent); {known}. Calls without a reward by tag get the episode's"
            )
    return found


def assemble(
    policy: str, begin: EpisodeBegin, end: EpisodeEnd, turns: Sequence[Turn], *, group_members: int
) -> Episode:
    """The message for one policy's learner. A pure function of stored rows: making it twice gives equal bytes."""
    by_id = {turn.call_id: turn for turn in turns}
    kept = answered({turn.call_id: Call.of(turn, 0) for turn in turns}, end.calls)
    sent = {call_id for call_id in kept if by_id[call_id].policy == policy}
    return Episode(
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
        success=end.success,
        metrics=end.metrics,
        metadata=end.metadata,
        client_id=begin.client_id,
        code_version=begin.code_version,
        attempt=begin.attempt,
        turns=tuple(_rebase(turn, by_id, sent) for turn in turns if turn.call_id in sent),
    )


def _rebase(turn: Turn, by_id: Mapping[str, Turn], sent: Collection[str]) -> Turn:
    """The same prompt, told relative to the nearest ancestor in `sent`."""
    parent, shared, prompt_ids = turn.parent, turn.shared, turn.prompt_ids
    while parent is not None and parent not in sent:
        lost = by_id[parent]
        if shared > lost.shared:
            own = lost.prompt_ids + lost.sampled_ids
            prompt_ids = own[: 4 * (shared - lost.shared)] + prompt_ids
            shared = lost.shared
        parent = lost.parent
    if parent == turn.parent:
        return turn
    return msgspec.structs.replace(turn, parent=parent, shared=shared, prompt_ids=prompt_ids)


def _equal_requests(calls: Collection[Call]) -> list[list[list[Call]]]:
    """Sendings of equal requests, each a list of its choices, in order of arrival; single sendings left out."""
    equal: dict[tuple[str, str, str | None], dict[str, list[Call]]] = defaultdict(dict)
    for call in calls:
        if call.request_digest:
            requests = equal[call.policy, call.request_digest, call.agent]
            requests.setdefault(call.request_id, []).append(call)
    return [list(requests.values()) for requests in equal.values() if len(requests) > 1]


def _retried(requests: list[list[Call]], continued: Collection[str]) -> list[list[Call]]:
    """Rule (b): the sendings that a later one replaced. The last sending of a request claims all before it."""
    lost: set[int] = set()
    for last in sorted(range(len(requests)), key=lambda n: -requests[n][0].retry):
        if last in lost:
            continue
        for retry in range(requests[last][0].retry):
            earlier = [n for n, choices in enumerate(requests) if n not in lost and choices[0].retry == retry]
            if earlier:
                lost.add(max(earlier, key=lambda n: (not _is_continued(requests[n], continued), n < last, n)))
    return [requests[n] for n in lost]


def _abandoned(requests: list[list[Call]], continued: Collection[str]) -> list[list[Call]]:
    """Rule (c): sendings that nothing continues while an equal one of the same retry number is continued."""
    live = {choices[0].retry for choices in requests if _is_continued(choices, continued)}
    return [choices for choices in requests if choices[0].retry in live and not _is_continued(choices, continued)]


def _is_continued(choices: Sequence[Call], continued: Collection[str]) -> bool:
    return any(call.call_id in continued for call in choices)
