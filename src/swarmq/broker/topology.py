"""Names and arguments of everything swarmq declares in RabbitMQ; nothing else knows them.

    client, proxy, learner ──> swarmq.<run>.in                ──> collector (one at a time, in order)
    collector              ──> swarmq.<run>.<policy>.ready    ──> learner   (one at a time, in order)
    collector              ──> swarmq.<run>.tickets.<kind>    ──> clients, competing
    feeder                 ──> swarmq.<run>.tasks.<kind>      ──> workers, competing
    worker                 ──> swarmq.<run>.tasks.<kind>.again ──> workers, competing: tasks whose group waits for another attempt
    feeder                 ──> swarmq.<run>.fed.<kind>.<data> ──> the feeder that goes on after it was killed
    operator               ──> swarmq.<run>.control           ──> collector (commands, and the tasks to evaluate with)
    collector              ──> swarmq.<run>.<policy>.control  ──> learner
    collector              ──> swarmq.<run>.eval.<kind>       ──> workers, competing
    `swarmq up`            ─── swarmq.<run>.claim             ─── itself: the name is taken while this exclusive queue exists
    everybody              ──> [swarmq.events] <run>.<source>.<name> ──> whoever listens
    an invited client      ──> [swarmq.clients] <run>.<client>.in                          ──> swarmq.<run>.in
                                          <run>.<client>.tasks.<kind>[.again] | .eval.<kind> ──> swarmq.<run>.returned ──> collector
    poison, worn out       ──> [swarmq.dead] ──> swarmq.dead  ──> `swarmq dead`

Queues are addressed by name through the default exchange, so publishing needs no right but to write, and a wrong
name comes back instead of vanishing. Arguments mean the same on RabbitMQ 3.10, 4.0 and 4.3 and never change:
a queue declared with others is refused. What must be tunable belongs into a broker policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DEAD = "swarmq.dead"
"""The fanout exchange and the queue behind it, where messages go that nobody can use."""

CLIENTS = "swarmq.clients"
"""Topic exchange that invited clients publish to. RabbitMQ lets each use only keys that begin with its own user name,
`<run>.<client>`, so a message tells for certain who sent it; operators use the default exchange."""

EVENTS = "swarmq.events"
"""Topic exchange of events, routing key `<run>.<source>.<name>`."""

DELIVERY_LIMIT = 100
"""Redeliveries before a message is parked. Always positive: -1 drops messages on RabbitMQ 3.10."""

DEAD_DELIVERY_LIMIT = 1_000_000_000
"""Looking at dead messages redelivers them; RabbitMQ 4 would drop them after 20 looks."""

ACK_S = 7 * 24 * 3600.0
"""How long a consumer may hold a message unacknowledged: tasks and batches are held for as long as they take."""

ACK_TIMEOUT_PROPERTY = "swarmq_ack_timeout_ms"
"""By which a RabbitMQ that does not heed `consumer_arguments` tells its clients what its settings allow."""

EVENT_BACKLOG = 10_000
"""Events kept for one slow listener; older ones are dropped."""

EVENT_QUEUE_ARGUMENTS: dict[str, Any] = {"x-max-length": EVENT_BACKLOG, "x-overflow": "drop-head"}


def inbox(run: str) -> str:
    return f"swarmq.{run}.in"


def parse_inbox_run(queue: str) -> str:
    """Empty for another queue."""
    run = queue.removeprefix("swarmq.").removesuffix(".in")
    return run if queue == inbox(run) else ""


def ready(run: str, policy: str) -> str:
    return f"swarmq.{run}.{policy}.ready"


def tickets(run: str, kind: str) -> str:
    return f"swarmq.{run}.tickets.{kind}"


def tasks(run: str, kind: str) -> str:
    return f"swarmq.{run}.tasks.{kind}"


def retries(run: str, kind: str) -> str:
    """What failed and is to be attempted next. A queue of its own, because nothing overtakes in `tasks`; named so that clients
    which were invited before it existed may use it."""
    return f"{tasks(run, kind)}.again"


def receipts(run: str, kind: str, data: str) -> str:
    """The receipts of one feed, by the digest of its data; gone when it is complete."""
    return f"swarmq.{run}.fed.{kind}.{data[:16]}"


def control(run: str, policy: str | None = None) -> str:
    """Where commands go to the collector; with a policy, where its learner is told of them."""
    return f"swarmq.{run}.{policy}.control" if policy else f"swarmq.{run}.control"


def evals(run: str, kind: str) -> str:
    return f"swarmq.{run}.eval.{kind}"


def returned_tasks(run: str) -> str:
    """Where tasks go that invited clients give back; the collector puts those that were fed on their queues again."""
    return f"swarmq.{run}.returned"


def claim(run: str) -> str:
    return f"swarmq.{run}.claim"


def client_user(run: str, client: str) -> str:
    """RabbitMQ's name for an invited client; neither part has a dot."""
    return f"{run}.{client}"


def client_key(user: str, queue: str) -> str:
    """The routing key with which an invited client publishes what is meant for a queue of its run."""
    run = user.partition(".")[0]
    return f"{user}.{queue.removeprefix(f'swarmq.{run}.')}"


def parse_sender(key: str) -> str:
    """The user that published with this routing key."""
    return ".".join(key.split(".")[:2])


def client_bindings(run: str, kinds: Iterable[str]) -> dict[str, str]:
    """Routing key of invited clients -> the queue that it leads to."""
    given_back = {
        client_key(f"{run}.*", name(run, kind)): returned_tasks(run) for kind in kinds for name in RETURNABLE_QUEUES
    }
    return {f"{run}.*.in": inbox(run)} | given_back


def obsolete_client_bindings(run: str, kinds: Iterable[str]) -> dict[str, str]:
    """Bindings of older versions, to be removed: clients reached the dead letters, and other clients' tasks, unchecked."""
    given_back = {
        f"{run}.*.{what}.{kind}": name(run, kind)
        for kind in kinds
        for name, what in ((tasks, "tasks"), (evals, "eval"))
    }
    return {"*.*.dead": DEAD} | given_back


def client_destination(user: str, queue: str) -> str:
    """The queue to which a message of this client for `queue` may go; empty if there is none."""
    run = user.partition(".")[0]
    if queue in (inbox(run), returned_tasks(run)):
        return queue
    return returned_tasks(run) if queue.startswith((tasks(run, ""), evals(run, ""))) else ""


RETURNABLE_QUEUES = (tasks, retries, evals)
"""Queues from which workers take, and for which they return what is to be tried again."""


def event_key(run: str, source: str, name: str) -> str:
    return f"{run}.{source}.{name}"


def run_queues(run: str, *, policies: Iterable[str], kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Queue name -> arguments, for all queues of a run."""
    ordered = [inbox(run), control(run), *(name(run, policy) for policy in policies for name in (ready, control))]
    competing = [returned_tasks(run), *(name(run, kind) for kind in kinds for name in (tickets, tasks, retries, evals))]
    return {name: queue_arguments(single=name in ordered) for name in [*ordered, *competing]}


def queue_arguments(*, single: bool) -> dict[str, Any]:
    """Arguments of a work queue; `single` gives it one active consumer, which keeps the order across a takeover."""
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


def consumer_arguments(ack_s: float) -> dict[str, Any]:
    return {"x-consumer-timeout": round(ack_s * 1000)}


def dead_letter_arguments() -> dict[str, Any]:
    return {"x-queue-type": "quorum", "x-delivery-limit": DEAD_DELIVERY_LIMIT}
