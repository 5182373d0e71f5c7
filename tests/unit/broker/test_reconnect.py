"""One death of the broker is one line of each process, and one when it is back."""

from __future__ import annotations

from structlog.testing import capture_logs

from swarmq.broker.reconnect import BrokerLink, BrokerOutage


def test_many_links_say_once_that_the_broker_is_gone_and_once_that_it_is_back() -> None:
    outage = BrokerOutage("amqp://host/")
    links = [BrokerLink("amqp://host/", name=str(number)) for number in range(10)]
    with capture_logs() as said:
        for _ in range(3):
            for link in links:
                outage.begin(link, "lost", connection="x", reason="died")
        for link in links[1:]:
            outage.end(link)
        outage.end(links[0])
    assert [(one["event"], one.get("connections")) for one in said] == [("lost", None), ("broker_reachable", 10)]


def test_a_link_that_is_closed_meanwhile_is_not_waited_for_and_the_next_outage_is_said_again() -> None:
    outage = BrokerOutage("amqp://host/")
    one, other = BrokerLink("amqp://host/", name="1"), BrokerLink("amqp://host/", name="2")
    with capture_logs() as said:
        for _ in range(2):
            outage.begin(one, "lost", connection="x", reason="died")
            outage.begin(other, "lost", connection="x", reason="died")
            outage.leave(other)
            outage.end(one)
            outage.end(one)
    assert [entry["event"] for entry in said] == ["lost", "broker_reachable"] * 2


def test_a_cluster_of_which_no_node_can_be_reached_is_said_besides_the_lost_session() -> None:
    outage = BrokerOutage("amqp://a/,amqp://b/")
    links = [BrokerLink("amqp://a/,amqp://b/", name=str(number)) for number in range(3)]
    with capture_logs() as said:
        for _ in range(2):
            for event in ("lost", "unreachable", "unreachable"):
                for link in links:
                    outage.begin(link, event, connection="x", reason="died")
            for link in links:
                outage.end(link)
    assert [(one["event"], one.get("broker")) for one in said] == [
        ("lost", None),
        ("unreachable", None),
        ("broker_reachable", "a:5672, b:5672"),
    ] * 2
