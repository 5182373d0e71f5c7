"""Refusals in words that a person can act on."""

from __future__ import annotations

import pytest
from aiormq import exceptions as amqp

from swarmq.broker.error_mapping import combine_failures, map_error
from swarmq.errors import BrokerError, BrokerLostError, LoginRefusedError, UnroutableError


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (amqp.ProbableAuthenticationError("ACCESS_REFUSED - Login was refused"), LoginRefusedError, "user or password"),
        (amqp.ChannelNotFoundEntity("NOT_FOUND - no queue 'q' in vhost '/'"), UnroutableError, "no queue 'q'"),
        (amqp.ChannelNotFoundEntity("NOT_FOUND - queue 'q' process is stopped"), BrokerLostError, "stopped"),
        (amqp.ChannelAccessRefused("ACCESS_REFUSED - write access"), BrokerError, "lacks this right"),
        (amqp.ChannelPreconditionFailed("PRECONDITION_FAILED - inequivalent arg"), BrokerError, "inequivalent arg"),
        (amqp.InvalidFrameError("Expected one of ['Connection.OpenOk'], got"), BrokerError, "virtual host"),
        (amqp.InvalidFrameError("No frame length"), BrokerLostError, "No frame length"),
        (amqp.AMQPConnectionError(111, "Connection refused"), BrokerLostError, "Connection refused"),
        (ConnectionResetError(104, "Connection reset by peer"), BrokerLostError, "reset by peer"),
        (amqp.ChannelInvalidStateError("closed"), BrokerLostError, "closed"),
        (TimeoutError(), BrokerLostError, "does not answer"),
    ],
)
def test_what_may_pass_is_told_from_what_will_not(error: Exception, kind: type, words: str) -> None:
    mapped = map_error(error, "host:5672")
    assert type(mapped) is kind
    assert words in str(mapped)
    assert "host:5672" in str(mapped)


def test_an_unreachable_cluster_names_every_node_with_its_reason() -> None:
    failures = {
        "a:5672": mapped(ConnectionRefusedError(111, "Connection refused"), "a:5672"),
        "b:5672": mapped(OSError(-2, "Name or service not known"), "b:5672"),
        "c:5672": mapped(TimeoutError("no answer within 8 s"), "c:5672"),
    }
    combined = combine_failures(failures)
    assert type(combined) is BrokerLostError
    assert str(combined) == (
        "no node of the RabbitMQ cluster can be reached: a:5672 ([Errno 111] Connection refused); "
        "b:5672 ([Errno -2] Name or service not known); c:5672 (no answer within 8 s)"
    )


def test_a_refusal_of_one_node_is_not_hidden_by_unreachable_ones() -> None:
    failures = {
        "a:5672": mapped(ConnectionRefusedError(111, "Connection refused"), "a:5672"),
        "b:5672": mapped(amqp.ProbableAuthenticationError("ACCESS_REFUSED"), "b:5672"),
    }
    combined = combine_failures(failures)
    assert type(combined) is LoginRefusedError
    assert str(combined).startswith("RabbitMQ at b:5672 refused user or password")
    assert str(combined).endswith("also tried: a:5672 ([Errno 111] Connection refused)")


def test_the_only_node_keeps_its_own_error() -> None:
    only = mapped(TimeoutError(), "a:5672")
    assert combine_failures({"a:5672": only}) is only


def mapped(error: Exception, where: str) -> BrokerError:
    """The error as `open_session` raises it, with its cause."""
    try:
        raise map_error(error, where) from error
    except BrokerError as raised:
        return raised
