"""Urls and refusals in words a person can act on, and never with a password."""

from __future__ import annotations

import pytest
from aiormq import exceptions as amqp

from swarmq.broker.error_mapping import map_error, redact_url
from swarmq.errors import BrokerError, BrokerLostError, LoginRefusedError, UnroutableError


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("amqp://u:p@host:1234/", "host:1234"),
        ("amqp://u:p@host", "host:5672"),
        ("amqps://u:p@host/team", "host:5671/team"),
        ("amqp://u:p@host/%2F", "host:5672"),
        ("amqp://u:p@[::1]:5000/a%20b?heartbeat=3", "::1:5000/a b"),
    ],
)
def test_an_address_names_the_place_without_the_password(url: str, where: str) -> None:
    assert redact_url(url) == where


@pytest.mark.parametrize(
    "url", ["", "host:5672", "http://host/", "amqp://", "amqp://h:99999", "amqp://h:port", "amqp://[::1"]
)
def test_a_bad_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(BrokerError, match="amqp://user:password@host:5672/vhost"):
        redact_url(url)


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
