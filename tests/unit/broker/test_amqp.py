"""How long a part that starts waits for a broker that is away."""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarmq.broker import amqp
from swarmq.errors import BrokerError


@pytest.fixture
def nobody():
    """The url of a port that refuses."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"amqp://u:p@127.0.0.1:{taken.getsockname()[1]}/"


async def test_an_address_that_has_never_answered_is_given_up(nobody, monkeypatch):
    monkeypatch.delenv(amqp.BROKER_ANSWERED_ENV, raising=False)
    assert amqp.initial_connect_timeout_s() == amqp.OPEN_S
    with pytest.raises(BrokerError, match="RabbitMQ at 127.0.0.1"):
        async with amqp.AmqpBroker.open(nobody, name="x", deadline_s=0.01):  # be it before the first answer or after it
            pass


async def test_a_part_of_a_run_that_is_up_waits_for_its_broker_to_be_back(nobody, monkeypatch):
    monkeypatch.setenv(amqp.BROKER_ANSWERED_ENV, "1")
    assert amqp.initial_connect_timeout_s() is None
    with pytest.raises(TimeoutError):
        async with (
            asyncio.timeout(0.2),
            amqp.AmqpBroker.open(nobody, name="x", deadline_s=None),
        ):
            pass
