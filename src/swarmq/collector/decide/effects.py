"""What the core asks its shell to do.

Most are rows: their fields stand in the order of the SQL statement that runs them (`store.py`). `Forward`,
`IssueTicket`, `IssueEval` and `Tell` are rows of an outbox and are published after the commit; asked for once more, they are
published once more. `Emit` and `DeadLetter` are no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from swarmq.messages import EventName


class Effect(msgspec.Struct, frozen=True):
    """Base of everything a core asks for."""


class Open(Effect, frozen=True):
    episode_id: str
    began_at: float


class SaveBegin(Effect, frozen=True):
    body: bytes
    episode_id: str


class Taint(Effect, frozen=True):
    number: int
    """Of `records.TAINTS`."""
    episode_id: str


class SaveTurn(Effect, frozen=True):
    """A turn, or what a proxy said of answers of the episode."""

    episode_id: str
    body: bytes


class SaveEnd(Effect, frozen=True):
    body: bytes
    episode_id: str


class Seal(Effect, frozen=True):
    """The end is decided: what later duplicates are compared with."""

    slot_id: str
    kind: str
    client_id: str
    digest: bytes
    calls: str
    """Call ids, one a line."""
    episode_id: str


class Accept(Effect, frozen=True):
    """Finished, winner of its slot, waits for its group."""

    policies: str
    episode_id: str


class Release(Effect, frozen=True):
    """Its group is published."""

    episode_id: str


class Close(Effect, frozen=True):
    """The last word on an episode; bodies are no longer needed."""

    state: str
    """`trained`, `dropped` or `eval`."""
    reason: str
    episode_id: str


class ForgetTurns(Effect, frozen=True):
    episode_id: str


class WinSlot(Effect, frozen=True):
    slot_id: str
    episode_id: str


class FreeSlot(Effect, frozen=True):
    slot_id: str


class GiveUpSlot(Effect, frozen=True):
    """No further attempt at this slot of an open group will come."""

    group_id: str
    slot_id: str
    kind: str
    size: int
    at: float


class ForgetGivenUp(Effect, frozen=True):
    """The group has gone on, or nothing of it will come."""

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


class Outcome(Effect, frozen=True):
    """The ledger: what became of one policy's part of a forwarded episode."""

    episode_id: str
    policy: str
    group_id: str
    state: str
    """`pending`, `trained` or `dropped`."""
    version: int
    reason: str


class Forward(Effect, frozen=True):
    """Publish this episode to the policy's `ready` queue; an outbox row until confirmed."""

    episode_id: str
    policy: str
    group_members: int


class Forwarded(Effect, frozen=True):
    episode_id: str
    policy: str


class IssueTicket(Effect, frozen=True):
    """Publish a ticket; unsent until confirmed, out until a begin carries it."""

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
    """The control state, whole."""

    body: bytes


class SaveReply(Effect, frozen=True):
    """A command is answered: sent again, it gets the same answer."""

    command_id: str
    body: bytes


class Tell(Effect, frozen=True):
    """Publish the control state to a learner; an outbox row until it, or a later one, is confirmed."""

    policy: str
    number: int


class Told(Effect, frozen=True):
    policy: str
    number: int


class SaveEvalTask(Effect, frozen=True):
    task_id: str
    kind: str
    repeats: int
    payload: bytes


class IssueEval(Effect, frozen=True):
    """Publish an attempt of a round to the eval queue of its kind; unsent until confirmed."""

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
    slot_id: str


class GiveUpEval(Effect, frozen=True):
    """No further try at this attempt of a round will come."""

    slot_id: str


class CloseRound(Effect, frozen=True):
    """The round is told and forgotten."""


class SaveVersion(Effect, frozen=True):
    policy: str
    version: int


class SaveCount(Effect, frozen=True):
    name: str
    value: int


class Emit(Effect, frozen=True):
    """Tell the watchers; best effort."""

    name: EventName
    fields: Mapping[str, Any]


class DeadLetter(Effect, frozen=True):
    """This piece is none of ours: park it with the reason."""

    reason: str
