"""What an invited client may say: who it is, when its episodes begin and end, and that a task is to be tried again.

RabbitMQ vouches for the sender (topology.CLIENTS); what is inside the message is the client's own word and is held
against that here, at every consumer, before anything is done with it. That a task which comes back was fed, its seal
says (keys.py): the collector looks at it.
"""

from __future__ import annotations

from swarmq.broker import topology
from swarmq.messages import EpisodeBegin, EpisodeEnd, Message, Task

NAME_SEPARATOR = "@"
"""Between a client's name and the process that uses it, in `client_id`. What begins with it is no client: an operator."""


def is_foreign(client_id: str, owner_id: str) -> bool:
    """Whether a client speaks for an episode that another one began. Operators may."""
    name, owner = (one.partition(NAME_SEPARATOR)[0] for one in (client_id, owner_id))
    return bool(name and owner) and name != owner


def find_violation(user: str, queue: str, message: Message) -> str:
    """Why this message of `user` must not be used in `queue`; empty if it may."""
    run, _, client = user.partition(".")
    if not queue.startswith(f"swarmq.{run}.") or message.run != run:
        return f"client {client!r} of run {run!r} sent it to another run"
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
