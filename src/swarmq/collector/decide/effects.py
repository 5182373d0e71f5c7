"""The effects that the core asks its shell to carry out.

Most effects are rows; their fields have the names of the placeholders in their SQL statement (`store.SQL`). `Forward`,
`IssueTicket`, `IssueEval`, `SendControl` and `SendEvaluation` are rows of an outbox and are published after the commit; one that is carried
out again after a crash is published again. `Emit` and `SendDeadLetter` are not rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from swarmq.messages import EventName


class Effect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all effects. Effects that are rows are also sent to standby collectors, by class name and order of fields: one whose fields
    change needs another name."""


class Open(Effect, frozen=True):
    """Open an episode by another message than its begin."""

    episode_id: str
    began_at: float


class Begin(Effect, frozen=True):
    """Open an episode by its begin."""

    body: bytes
    episode_id: str
    began_at: float


class SaveBegin(Effect, frozen=True):
    """Store the begin of an episode that another message has opened."""

    body: bytes
    episode_id: str


class Taint(Effect, frozen=True):
    number: int
    """Index into `state.TAINTS`."""
    episode_id: str


class SaveTurn(Effect, frozen=True):
    """Store a turn, or a delivery report on an episode."""

    episode_id: str
    body: bytes


class SaveEnd(Effect, frozen=True):
    """Store the end of an episode that cannot be decided yet."""

    body: bytes
    episode_id: str


class Seal(Effect, frozen=True):
    """Mark an end as decided, and store what is needed to recognise later duplicates."""

    slot_id: str
    kind: str
    client_id: str
    digest: bytes
    calls: str
    """Ids of the episode's calls, one per line."""
    ended_at: float
    """Unix time, the collector's clock."""
    episode_id: str


class Finish(Seal, frozen=True):
    """Seal an episode that is finished, winner of its slot, and waits for its group."""

    policies: str
    end: bytes
    """The end's message, with the calls that are sent to learners."""


class Accept(Effect, frozen=True):
    """What followed `Seal` before there was `Finish`; the log of a run's collectors may hold it."""

    policies: str
    episode_id: str


class Release(Effect, frozen=True):
    """Mark an episode's group as published."""

    episode_id: str


class Close(Effect, frozen=True):
    """Settle an episode for good; its bodies are no longer needed."""

    state: str
    """`trained`, `dropped` or `eval`."""
    reason: str
    episode_id: str
    end: bytes = b""
    """The end's message if it is not in the store; only used for the episode's transcript, like `outcomes`."""
    outcomes: tuple[tuple[str, str, int, str], ...] = ()
    """(policy, state, version, reason) if the episode was given to one learner; if to several, they are in the store."""


class ForgetTurns(Effect, frozen=True):
    episode_id: str


class WinSlot(Effect, frozen=True):
    slot_id: str
    episode_id: str


class FreeSlot(Effect, frozen=True):
    slot_id: str


class GiveUpSlot(Effect, frozen=True):
    """Record that no further attempt at this slot of an open group will come."""

    group_id: str
    slot_id: str
    kind: str
    size: int
    at: float


class ForgetGivenUp(Effect, frozen=True):
    """Forget given-up slots of a group that was published or abandoned."""

    group_id: str


class SaveGroup(Effect, frozen=True):
    group_id: str
    kind: str
    size: int
    state: str
    """`open`, `published` or `done`."""
    since: float


class FreeGroup(Effect, frozen=True):
    group_id: str


class SaveOutcome(Effect, frozen=True):
    """Record the fate of one policy's part of a forwarded episode in the ledger."""

    episode_id: str
    policy: str
    group_id: str
    state: str
    """`pending`, `trained` or `dropped`."""
    version: int
    reason: str


class Forward(Effect, frozen=True):
    """Publish a rollout to the policy's `ready` queue; an outbox row until confirmed."""

    episode_id: str
    policy: str
    group_members: int


class ForwardSent(Effect, frozen=True):
    episode_id: str
    policy: str


class IssueTicket(Effect, frozen=True):
    """Publish a ticket. It is unsent until the broker confirms it, and out until a begin carries it."""

    ticket_id: str
    kind: str


class TicketSent(Effect, frozen=True):
    ticket_id: str


class TicketUsed(Effect, frozen=True):
    ticket_id: str


class SaveCredit(Effect, frozen=True):
    kind: str
    allocated: int
    trained: int
    debt: float
    due: int


class SaveControl(Effect, frozen=True):
    """Store the whole control state."""

    body: bytes


class SaveReply(Effect, frozen=True):
    """Store the reply to a command, which is given again when the command is repeated."""

    command_id: str
    body: bytes


class SendControl(Effect, frozen=True):
    """Publish the control state to a learner; an outbox row until this or a later state is confirmed."""

    policy: str
    number: int


class ControlSent(Effect, frozen=True):
    policy: str
    number: int


class SaveEvalTask(Effect, frozen=True):
    task_id: str
    kind: str
    repeats: int
    payload: bytes


class IssueEval(Effect, frozen=True):
    """Publish an attempt of a round to its kind's evaluation queue; unsent until confirmed."""

    slot_id: str
    slot: bytes
    kind: str
    version: int
    began_at: float


class EvalSent(Effect, frozen=True):
    slot_id: str


class EvalDone(Effect, frozen=True):
    reward: float
    success: bool
    metrics: bytes
    """msgpack of name -> value, with a bounded number of metrics."""
    slot_id: str


class GiveUpEval(Effect, frozen=True):
    """Record that no further try at this attempt of a round will come."""

    slot_id: str


class CloseRound(Effect, frozen=True):
    """Forget a round that was reported."""


class SendEvaluation(Effect, frozen=True):
    """Send the results of a round to a learner, for its trackers; unsent until confirmed."""

    policy: str
    began_at: float
    body: bytes
    """The results, as an encoded `Evaluation`."""


class EvaluationSent(Effect, frozen=True):
    policy: str
    began_at: float


class SaveVersion(Effect, frozen=True):
    policy: str
    version: int


class SaveCount(Effect, frozen=True):
    name: str
    value: int


class SaveFile(Effect, frozen=True):
    """Store the content of a registry file of the run folder, for standby collectors."""

    name: str
    body: bytes


class Emit(Effect, frozen=True):
    """Publish an event; best effort."""

    name: EventName
    fields: Mapping[str, Any]


class SendDeadLetter(Effect, frozen=True):
    """Dead-letter a message that is not valid for this run, with the reason."""

    reason: str
