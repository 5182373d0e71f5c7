"""One `swarmq up` for each name."""

from __future__ import annotations

import pytest

from swarmq.broker import topology
from swarmq.broker.run_claim import claim_run
from swarmq.broker.session import open_session
from swarmq.errors import BrokerError
from swarmq.testing import TcpRelay

pytestmark = pytest.mark.broker


async def test_a_name_has_one_holder_and_is_free_when_that_one_has_gone(amqp_url, run_name):
    async with claim_run(amqp_url, run_name), claim_run(amqp_url, f"{run_name}-other"):
        with pytest.raises(BrokerError, match=f"run '{run_name}' is up, or starting, on this broker already"):
            async with claim_run(amqp_url, run_name):
                pass
    async with open_session(amqp_url, name="test") as session:
        while await locked(session, run_name):  # until the broker has closed the connection
            pass
    async with claim_run(amqp_url, run_name):
        pass


async def test_a_holder_that_lost_its_connection_claims_the_name_again(amqp_url, run_name, logs):
    host, _, port = amqp_url.rpartition("@")[2].partition("/")[0].partition(":")
    async with (
        TcpRelay.to(host, int(port)) as relay,
        claim_run(amqp_url.replace(f":{port}", f":{relay.port}"), run_name),
    ):
        relay.cut()
        await logs.seen("broker_session_lost")
        async with open_session(amqp_url, name="test") as session:
            while not await locked(session, run_name):
                pass


async def locked(session, run):
    """Whether somebody holds the name just now; each look costs its channel where the answer is no."""
    channel = await session.connection.channel()
    try:
        await channel.declare_queue(topology.claim(run), passive=True)
    except Exception as error:
        return "RESOURCE_LOCKED" in str(error)
    return False
