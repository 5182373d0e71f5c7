"""Names and arguments that every release and every RabbitMQ must agree on."""

from __future__ import annotations

from swarmq.broker import topology

QUORUM = {
    "x-queue-type": "quorum",
    "x-delivery-limit": 100,
    "x-dead-letter-exchange": "swarmq.dead",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
SINGLE = QUORUM | {"x-single-active-consumer": True}


def test_a_runs_queues_and_their_arguments_never_change() -> None:
    """RabbitMQ refuses a queue that is declared with other arguments than it has: runs would not survive an upgrade."""
    assert topology.run_queues("demo", policies=["main"], kinds=["math"]) == {
        "swarmq.demo.in": SINGLE,
        "swarmq.demo.control": SINGLE,
        "swarmq.demo.main.ready": SINGLE,
        "swarmq.demo.main.control": SINGLE,
        "swarmq.demo.returned": QUORUM,
        "swarmq.demo.tickets.math": QUORUM,
        "swarmq.demo.tasks.math": QUORUM,
        "swarmq.demo.tasks.math.again": QUORUM,
        "swarmq.demo.eval.math": QUORUM,
    }
    assert topology.dead_letter_arguments() == {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000_000}


def test_a_group_size_is_an_argument_of_the_runs_queues_alone_and_only_if_it_is_set() -> None:
    """The dead-letter queue is shared by runs whose sizes may differ."""
    sized = topology.run_queues("demo", policies=["main"], kinds=["math"], replicas=5)
    usual = topology.run_queues("demo", policies=["main"], kinds=["math"])
    assert sized == {name: {**arguments, "x-quorum-initial-group-size": 5} for name, arguments in usual.items()}


def test_every_kind_and_policy_has_its_queues() -> None:
    names = set(topology.run_queues("r", policies=["a", "b"], kinds=["x", "y"]))
    assert names == {
        *("swarmq.r.in", "swarmq.r.control", "swarmq.r.returned"),
        *(f"swarmq.r.{policy}.{what}" for what in ("ready", "control") for policy in "ab"),
        *(f"swarmq.r.{what}.{kind}" for what in ("tickets", "tasks", "eval") for kind in "xy"),
        *(f"swarmq.r.tasks.{kind}.again" for kind in "xy"),
    }


def test_the_turns_of_an_episode_have_one_queue_and_episodes_are_spread() -> None:
    usual = topology.run_queues("r", policies=["a"], kinds=["x"])
    divided = topology.run_queues("r", policies=["a"], kinds=["x"], turn_queues=3)
    queues = divided.keys() - usual.keys()
    assert queues == {topology.turns("r", number) for number in (1, 2, 3)}
    assert all(divided[queue] == divided[topology.inbox("r")] for queue in queues)
    assert {topology.turns_of("r", f"e{number}", 3) for number in range(50)} == queues
    assert topology.turns_of("r", "e", 0) == topology.inbox("r")
    assert {topology.parse_turns_run(queue) for queue in (*queues, topology.inbox("r"))} == {"r"}
    assert not any(map(topology.parse_turns_run, usual.keys() - {topology.inbox("r")}))


def test_clients_compete_for_tickets_and_tasks() -> None:
    queues = topology.run_queues("r", policies=["a"], kinds=["x"])
    assert [name for name, arguments in queues.items() if "x-single-active-consumer" not in arguments] == [
        topology.returned_tasks("r"),
        topology.tickets("r", "x"),
        topology.tasks("r", "x"),
        topology.retries("r", "x"),
        topology.evals("r", "x"),
    ]


def test_delivery_limits_are_positive() -> None:
    """-1 means unlimited on RabbitMQ 4 and drops at the first redelivery on 3.10."""
    queues = topology.run_queues("r", policies=["a"], kinds=["x"]) | {"dead": topology.dead_letter_arguments()}
    assert all(arguments["x-delivery-limit"] > 0 for arguments in queues.values())
