"""Every queue and exchange with its arguments, from `swarmq.broker.topology`."""

from __future__ import annotations

from collections.abc import Iterator

from docs.generator.reference.source import directive

from swarmq.broker import topology

RUN, POLICY, KIND = "<run>", "<policy>", "<kind>"


def page() -> str:
    return "\n".join(_parts())


def _parts() -> Iterator[str]:
    flow, about = (topology.__doc__ or "").split("\n\n", 1)[1].rsplit("\n\n", 1)
    yield directive("code-block", "text", flow)
    yield about.strip() + "\n"
    queues = topology.run_queues(RUN, policies=[POLICY], kinds=[KIND])
    yield "## Queues of a run\n\n| queue | consumers at a time |\n|---|---|"
    for name, arguments in queues.items():
        yield f"| `{name}` | {'one, in order' if arguments.get('x-single-active-consumer') else 'any number'} |"
    yield "\nAll of them have these arguments:\n"
    yield from _arguments(topology.queue_arguments(single=False))
    yield f"Queues for one consumer also have `x-single-active-consumer`. A feed keeps its receipts in `{topology.receipts(RUN, KIND, '<data>')}`, and `{topology.claim(RUN)}` exists while `swarmq up` runs.\n"
    yield f"## Dead letters: `{topology.DEAD}`\n"
    yield "A fanout exchange and the queue behind it, shared by all runs of the broker, with these arguments:\n"
    yield from _arguments(topology.dead_letter_arguments())
    yield f"## Events: `{topology.EVENTS}`\n"
    yield f"A topic exchange with the routing key `{topology.event_key(RUN, '<source>', '<name>')}`. Every subscriber has a queue of its own with these arguments:\n"
    yield from _arguments(topology.EVENT_QUEUE_ARGUMENTS)
    yield f"## Invited clients: `{topology.CLIENTS}`\n"
    yield "A topic exchange. RabbitMQ allows a client only routing keys that begin with its own user name.\n"
    yield "| routing key | goes to |\n|---|---|"
    for key, queue in topology.client_bindings(RUN, [KIND]).items():
        yield f"| `{key}` | `{queue}` |"
    yield ""


def _arguments(arguments: dict[str, object]) -> Iterator[str]:
    yield "| argument | value |\n|---|---|"
    for name, value in arguments.items():
        yield f"| `{name}` | `{value}` |"
    yield ""
