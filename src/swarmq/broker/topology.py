"""Names and arguments of everything swarmq declares in RabbitMQ; no other module builds them.

    client, proxy, learner ──> swarmq.<run>.in                ──> collector (one at a time, in order)
    proxy                  ──> swarmq.<run>.turns.<n>         ──> collector, if it has several processes (one at a time, in order)
    collector              ──> swarmq.<run>.<policy>.ready    ──> learner   (one at a time, in order)
    collector              ──> swarmq.<run>.tickets.<kind>    ──> clients, competing
    feeder                 ──> swarmq.<run>.tasks.<kind>      ──> workers, competing
    worker                 ──> swarmq.<run>.tasks.<kind>.again ──> workers, competing: tasks whose group waits for another attempt
    feeder                 ──> swarmq.<run>.fed.<kind>.<data> ──> the feeder that continues after one was killed
    operator, other hosts  ──> swarmq.<run>.control           ──> collector (commands, tasks to evaluate with, registrations)
    collector              ──> swarmq.<run>.<policy>.control  ──> learner
    collector              ──> swarmq.<run>.eval.<kind>       ──> workers, competing
    collector              ──> swarmq.<run>.log               ──> all collectors of the run, if it has standbys: a stream
    `swarmq up`            ─── swarmq.<run>.claim             ─── itself: the name is taken while this exclusive queue exists
    everybody              ──> [swarmq.events] <run>.<source>.<name> ──> subscribers
    an invited client      ──> [swarmq.clients] <run>.<client>.in                          ──> swarmq.<run>.in
                                          <run>.<client>.tasks.<kind>[.again] | .eval.<kind> ──> swarmq.<run>.returned ──> collector
    an invited host        ──> [swarmq.clients] as a client, and <run>.host:<name>.control ──> swarmq.<run>.control
    leader of a study      ──> swarmq.study-<name>.tasks.trials ──> workers of the study, competing; each holds one per trial
                               or swarmq.study-<name>.tasks.trials.<host> ──> workers of the host with the trial's checkpoint
    worker of a study      ──> swarmq.study-<name>.in           ──> leader of the study
    undecodable, too often redelivered ──> [swarmq.dead] ──> swarmq.dead  ──> `swarmq dead`

Queues are addressed by name through the default exchange, so publishing needs only the right to write, and a message to a wrong
name is returned instead of dropped. Arguments mean the same on RabbitMQ 3.10, 4.0 and 4.3 and must never change: RabbitMQ refuses
to declare an existing queue with other arguments. Only the group size may differ: an existing queue keeps the size that it has.
Tunable values belong in a broker policy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

DEAD = "swarmq.dead"
"""Fanout exchange for messages that no process can use, and the queue that is bound to it."""

CLIENTS = "swarmq.clients"
"""Topic exchange that invited clients and hosts publish to.

RabbitMQ allows each of them only routing keys that begin with its own user name, `<run>.<client>` or `<run>.host:<name>`, so the
sender of a message is certain. Operators use the default exchange.
"""

HOST_PREFIX = "host:"
"""Prefix of an invited host's name in its RabbitMQ user. A client's name has no colon, so the two cannot be confused."""

EVENTS = "swarmq.events"
"""Topic exchange of events, routing key `<run>.<source>.<name>`."""

DELIVERY_LIMIT = 100
"""Number of redeliveries after which RabbitMQ parks a message. Always positive: -1 drops messages on RabbitMQ 3.10."""

DEAD_DELIVERY_LIMIT = 1_000_000_000
"""Redelivery limit of the dead-letter queue. Reading dead letters redelivers them, and RabbitMQ 4 would by default drop them
after 20 reads."""

GROUP_SIZE = "x-quorum-initial-group-size"
"""Queue argument: number of nodes that hold the queue when it is declared. `broker.replicas` may differ from it later, because
RabbitMQ's commands add and remove members and leave the argument as it is."""

ACK_S = 7 * 24 * 3600.0
"""Acknowledgement timeout in seconds to request from the broker: consumers hold tasks and batches unacknowledged until their
work is done."""

ACK_TIMEOUT_PROPERTY = "swarmq_ack_timeout_ms"
"""Server property that states the configured acknowledgement timeout, for servers that ignore `consumer_arguments`."""

STREAM_OFFSET = "x-stream-offset"
"""Consumer argument: offset from which to read a stream. Also the header with the offset of a delivered entry."""

LOG_BYTES = 2 * 1024**3
"""Size of the log in bytes beyond which its oldest segment is deleted. A standby that lags by more requests a copy of the store."""
LOG_SEGMENT_BYTES = 128 * 1024**2

EVENT_BACKLOG = 10_000
"""Maximum number of events kept for one slow subscriber; older events are dropped."""

EVENT_QUEUE_ARGUMENTS: dict[str, Any] = {"x-max-length": EVENT_BACKLOG, "x-overflow": "drop-head"}


def inbox(run: str) -> str:
    return f"swarmq.{run}.in"


def turns(run: str, number: int) -> str:
    """Return one of the queues of turns, which are numbered from 1."""
    return f"swarmq.{run}.turns.{number}"


def turns_of(run: str, episode_id: str, num_queues: int) -> str:
    """Return the queue for the turns of an episode. `num_queues`: number of queues of turns; without any, turns go to the inbox."""
    return turns(run, zlib.crc32(episode_id.encode()) % num_queues + 1) if num_queues else inbox(run)


def parse_turns_run(queue: str) -> str:
    """Return the run to which a queue that carries turns belongs, or "" for any other queue."""
    run, _, number = queue.removeprefix("swarmq.").removesuffix(".in").partition(".turns.")
    return run if queue in (inbox(run), f"swarmq.{run}.turns.{number}") else ""


def ready(run: str, policy: str) -> str:
    return f"swarmq.{run}.{policy}.ready"


def tickets(run: str, kind: str) -> str:
    return f"swarmq.{run}.tickets.{kind}"


def tasks(run: str, kind: str) -> str:
    return f"swarmq.{run}.tasks.{kind}"


def retries(run: str, kind: str) -> str:
    """Return the queue of failed tasks to attempt next.

    It is separate because a message cannot overtake others in `tasks`. Its name begins with the name of `tasks`, so that clients
    with an invite of an older version may use it, too.
    """
    return f"{tasks(run, kind)}.again"


def receipts(run: str, kind: str, data: str) -> str:
    """Return the queue with the receipts of one feed, named by the digest of its data; deleted when the feed is complete."""
    return f"swarmq.{run}.fed.{kind}.{data[:16]}"


def control(run: str, policy: str | None = None) -> str:
    """Return the queue for commands to the collector or, if `policy` is given, for changed settings sent to that policy's learner."""
    return f"swarmq.{run}.{policy}.control" if policy else f"swarmq.{run}.control"


def evals(run: str, kind: str) -> str:
    return f"swarmq.{run}.eval.{kind}"


def returned_tasks(run: str) -> str:
    """Return the queue of tasks that invited clients give back. The collector returns tasks that were really fed to their
    queues."""
    return f"swarmq.{run}.returned"


def log(run: str) -> str:
    """Return the stream of the collectors' transactions (collector/decide/log.py)."""
    return f"swarmq.{run}.log"


def claim(run: str) -> str:
    return f"swarmq.{run}.claim"


def client_user(run: str, client: str) -> str:
    """Return the RabbitMQ user of an invited client; neither part contains a dot."""
    return f"{run}.{client}"


def host_user(run: str, host: str) -> str:
    """Return the RabbitMQ user of an invited host."""
    return f"{run}.{HOST_PREFIX}{host}"


def parse_host(user: str) -> str:
    """Return the invited host whose RabbitMQ user this is, or "" for any other user."""
    name = user.partition(".")[2]
    return name.removeprefix(HOST_PREFIX) if name.startswith(HOST_PREFIX) else ""


def client_key(user: str, queue: str) -> str:
    """Return the routing key with which an invited client publishes for a queue of its run."""
    run = user.partition(".")[0]
    return f"{user}.{queue.removeprefix(f'swarmq.{run}.')}"


def parse_sender(key: str) -> str:
    """Return the user that published with this routing key."""
    return ".".join(key.split(".")[:2])


def client_bindings(run: str, kinds: Iterable[str], turn_queues: int = 0) -> dict[str, str]:
    """Return a map from routing keys of invited clients and hosts to the queues they are bound to."""
    given_back = {
        client_key(f"{run}.*", name(run, kind)): returned_tasks(run) for kind in kinds for name in RETURNABLE_QUEUES
    }
    recorded = {client_key(f"{run}.*", name): name for name in list_turns(run, turn_queues)}
    return {f"{run}.*.in": inbox(run), f"{run}.*.control": control(run)} | recorded | given_back


def obsolete_client_bindings(run: str, kinds: Iterable[str]) -> dict[str, str]:
    """Return bindings of older versions, to be removed: they let clients reach dead letters and other clients' tasks unchecked."""
    given_back = {
        f"{run}.*.{what}.{kind}": name(run, kind)
        for kind in kinds
        for name, what in ((tasks, "tasks"), (evals, "eval"))
    }
    return {"*.*.dead": DEAD} | given_back


def client_destination(user: str, queue: str) -> str:
    """Return the queue that receives a client's messages for `queue` (returned tasks go to the collector first), or "" if the
    client may not publish for it."""
    run = user.partition(".")[0]
    if queue in (inbox(run), returned_tasks(run)) or (
        parse_host(user) and (queue == control(run) or parse_turns_run(queue) == run)
    ):
        return queue
    return returned_tasks(run) if queue.startswith((tasks(run, ""), evals(run, ""))) else ""


RETURNABLE_QUEUES = (tasks, retries, evals)
"""Queues from which workers take tasks, and to which failed tasks are returned."""


def event_key(run: str, source: str, name: str) -> str:
    return f"{run}.{source}.{name}"


def list_turns(run: str, turn_queues: int) -> list[str]:
    """Return the queues of turns."""
    return [turns(run, number) for number in range(1, turn_queues + 1)]


def run_queues(
    run: str, *, policies: Iterable[str], kinds: Iterable[str], replicas: int | None = None, turn_queues: int = 0
) -> dict[str, dict[str, Any]]:
    """Return a map from the names of all queues of a run to their arguments. `replicas`: number of nodes of
    a cluster that hold a queue; None leaves the argument out, and RabbitMQ takes all nodes up to 3. `turn_queues`: number of queues
    of turns."""
    ordered = [inbox(run), control(run), *(name(run, policy) for policy in policies for name in (ready, control))]
    ordered += list_turns(run, turn_queues)
    competing = [returned_tasks(run), *(name(run, kind) for kind in kinds for name in (tickets, tasks, retries, evals))]
    size = {GROUP_SIZE: replicas} if replicas else {}
    return {name: queue_arguments(single=name in ordered) | size for name in [*ordered, *competing]}


def queue_arguments(*, single: bool) -> dict[str, Any]:
    """Return the arguments of a work queue; `single` allows one active consumer, which keeps the order across a takeover."""
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-delivery-limit": DELIVERY_LIMIT,
        "x-dead-letter-exchange": DEAD,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    if single:
        arguments["x-single-active-consumer"] = True
    return arguments


def stream_arguments() -> dict[str, Any]:
    return {
        "x-queue-type": "stream",
        "x-max-length-bytes": LOG_BYTES,
        "x-stream-max-segment-size-bytes": LOG_SEGMENT_BYTES,
    }


def consumer_arguments(ack_s: float) -> dict[str, Any]:
    return {"x-consumer-timeout": round(ack_s * 1000)}


def dead_letter_arguments() -> dict[str, Any]:
    return {"x-queue-type": "quorum", "x-delivery-limit": DEAD_DELIVERY_LIMIT}
