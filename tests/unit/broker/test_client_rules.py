"""What an invited client's message may say."""

import re

import pytest

from swarmq.broker import topology
from swarmq.broker.client_rules import find_violation
from swarmq.client.episodes.identity import make_client_id
from swarmq.messages import EpisodeBegin, EpisodeEnd, Slot, Task, Ticket

INBOX = topology.inbox("r1")
TASKS, RETURNED = topology.tasks("r1", "math"), topology.returned_tasks("r1")


def begin(client, run="r1"):
    return EpisodeBegin(
        run=run,
        episode_id="e",
        slot=Slot(task_id="t"),
        kind="math",
        group_size=1,
        policies=("main",),
        client_id=client,
    )


def end(client):
    return EpisodeEnd(run="r1", episode_id="e", client_id=client, status="finished", rewards={"main": 1.0})


def task(attempt):
    return Task(run="r1", slot=Slot(task_id="t"), kind="math", group_size=1, attempt=attempt)


def test_a_client_speaks_for_itself_on_any_machine():
    for name in (make_client_id("alice"), make_client_id("alice"), "alice"):
        assert find_violation("r1.alice", INBOX, begin(name)) == ""
        assert find_violation("r1.alice", INBOX, end(name)) == ""
    assert find_violation("r1.alice", RETURNED, task(attempt=1)) == ""


@pytest.mark.parametrize(
    ("queue", "message", "why"),
    [
        (INBOX, begin("bob@x"), "in the name of 'bob@x'"),
        (INBOX, end("alice-2@x"), "in the name of 'alice-2@x'"),
        (INBOX, Ticket(run="r1", ticket_id="1", kind="math"), "may not send a Ticket"),
        (INBOX, begin("alice@x", run="r2"), "another run"),
        (topology.inbox("r2"), begin("alice@x"), "another run"),
        (RETURNED, task(attempt=0), "give a task back, not add one"),
        (TASKS, task(attempt=1), "give a task back, not add one"),
    ],
)
def test_what_it_may_not_say_is_told_with_its_name(queue, message, why):
    assert why in find_violation("r1.alice", queue, message)
    assert "'alice'" in find_violation("r1.alice", queue, message)


def test_routing_keys_carry_the_user_and_reach_the_queues():
    user = topology.client_user("r1", "alice")
    keys = {queue: topology.client_key(user, queue) for queue in (INBOX, TASKS)}
    assert keys == {INBOX: "r1.alice.in", TASKS: "r1.alice.tasks.math"}
    assert {topology.parse_sender(key) for key in keys.values()} == {user}
    bound = {
        "r1.*.in": INBOX,
        "r1.*.control": topology.control("r1"),
        "r1.*.tasks.math": RETURNED,
        "r1.*.tasks.math.again": RETURNED,
        "r1.*.eval.math": RETURNED,
    }
    assert topology.client_bindings("r1", ["math"]) == bound
    assert topology.client_bindings("r1", ["math"], 1) == bound | {"r1.*.turns.1": topology.turns("r1", 1)}
    assert not bound.items() & topology.obsolete_client_bindings("r1", ["math"]).items()


def test_a_client_that_was_invited_before_there_was_a_queue_for_further_attempts_may_use_it():
    again, user = topology.retries("r1", "math"), topology.client_user("r1", "alice")
    assert topology.client_key(user, again) == "r1.alice.tasks.math.again"
    assert re.match(r"^r1\.alice\.(in|dead|(tasks|eval)\..+)$", topology.client_key(user, again)), "what it may write"
    assert re.match(r"^swarmq\.r1\.(tickets|tasks|eval)\..*$", again), "what it may read"


@pytest.mark.parametrize(
    ("queue", "goes_to"),
    [
        (INBOX, INBOX),
        *[
            (queue, RETURNED)
            for queue in (TASKS, topology.retries("r1", "math"), topology.evals("r1", "math"), RETURNED)
        ],
        *[(queue, "") for queue in (topology.control("r1"), topology.inbox("r2"), topology.tickets("r1", "math"), "")],
        (topology.receipts("r1", "math", "0123"), ""),
    ],
)
def test_a_letter_of_a_client_goes_where_the_client_could_have_sent_it(queue, goes_to):
    assert topology.client_destination("r1.alice", queue) == goes_to


def test_a_host_records_turns_of_any_client_and_only_in_its_own_run():
    host = topology.host_user("r1", "gpu2")
    assert topology.parse_host(host) == "gpu2"
    assert topology.parse_host(topology.client_user("r1", "host")) == ""
    assert find_violation(host, INBOX, begin("alice@x")) == ""
    assert "another run" in find_violation(topology.host_user("r2", "gpu2"), INBOX, begin("alice@x"))
    assert topology.parse_sender(topology.client_key(host, topology.control("r1"))) == host
    turns = topology.turns("r1", 2)
    assert topology.client_destination(host, turns) == turns
    assert topology.client_destination(topology.client_user("r1", "alice"), turns) == ""
