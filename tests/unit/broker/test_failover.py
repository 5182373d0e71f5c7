"""Which node of a cluster a connection tries first."""

from __future__ import annotations

import random
from collections import Counter

from structlog.testing import capture_logs

from swarmq.broker.failover import AVOID_S, NodeFailures

NODES = ("amqp://u:secret@a/", "amqp://u:secret@b/", "amqp://u:secret@c/")


def make_failures() -> tuple[NodeFailures, list[float]]:
    now = [1000.0]
    return NodeFailures(clock=lambda: now[0], rng=random.Random(0)), now


def test_connections_start_at_every_node_equally_often() -> None:
    failures, _ = make_failures()
    first = Counter(failures.order(NODES)[0] for _ in range(3000))
    assert all(900 < first[node] < 1100 for node in NODES)
    assert all(sorted(failures.order(NODES)) == sorted(NODES) for _ in range(10))


def test_a_node_that_failed_is_tried_last_until_it_is_reached_or_a_minute_has_passed() -> None:
    failures, now = make_failures()
    failures.add(NODES[1])
    now[0] += 1
    failures.add(NODES[0])
    assert all(failures.order(NODES) == [NODES[2], NODES[1], NODES[0]] for _ in range(20))
    failures.remove(NODES[1])
    assert {failures.order(NODES)[0] for _ in range(50)} == {NODES[1], NODES[2]}
    now[0] += AVOID_S
    assert {failures.order(NODES)[0] for _ in range(50)} == set(NODES)


def test_a_skipped_node_is_logged_once_without_its_password_and_once_when_it_is_back() -> None:
    failures, _ = make_failures()
    with capture_logs() as said:
        for _ in range(2):
            for _ in range(3):
                failures.skip(NODES[0], "Connection refused")
            failures.remove(NODES[0])
            failures.remove(NODES[0])
    assert [(one["event"], one["node"]) for one in said] == [
        ("broker_node_unreachable", "a:5672"),
        ("broker_node_reachable", "a:5672"),
    ] * 2
