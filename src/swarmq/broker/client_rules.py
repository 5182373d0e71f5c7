"""Checks of the messages that invited clients and hosts send: that a client begins and ends only its own episodes, and returns
tasks but adds none. A host runs proxies, which record turns of all clients, so only its run is checked.

RabbitMQ verifies the sender (`topology.CLIENTS`). A client may write anything into the content, so every consumer compares it with
the sender before using the message. That a returned task was really fed is proved by its seal (keys.py), which the collector
checks.
"""

from __future__ import annotations

from swarmq.broker import topology
from swarmq.messages import EpisodeBegin, EpisodeEnd, Message, Task

NAME_SEPARATOR = "@"
"""Separator of client name and process in `client_id`; an id that begins with it belongs to an operator."""


def is_foreign(client_id: str, owner_id: str) -> bool:
    """Return whether a client speaks for an episode that another client began. Operators may speak for any episode."""
    name, owner = client_id.partition(NAME_SEPARATOR)[0], owner_id.partition(NAME_SEPARATOR)[0]
    return bool(name and owner) and name != owner


def find_violation(user: str, queue: str, message: Message) -> str:
    """Return why this message of `user` must not be used in `queue`, or "" if it may."""
    run, _, client = user.partition(".")
    if not queue.startswith(f"swarmq.{run}.") or message.run != run:
        return f"client {client!r} of run {run!r} sent it to another run"
    if topology.parse_host(user):
        return ""
    match message:
        case EpisodeBegin() | EpisodeEnd():
            if message.client_id.partition(NAME_SEPARATOR)[0] != client:
                return f"client {client!r} sent it in the name of {message.client_id!r}"
        case Task():
            if queue != topology.returned_tasks(run) or not message.attempt:
                return f"client {client!r} may give a task back, not add one"
        case _:
            return f"client {client!r} may not send a {type(message).__name__}"
    return ""
