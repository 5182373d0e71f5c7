"""What is left of a session that could not be opened."""

from __future__ import annotations

import gc

import aio_pika
import pytest

from swarmq.broker.session import open_session
from swarmq.errors import BrokerLostError

URL = "amqp://127.0.0.1:1/"


async def test_a_connection_that_could_not_be_opened_is_closed() -> None:
    """Else the driver closes it when it is collected, which may be in a thread where it cannot."""
    with pytest.raises(BrokerLostError) as held:
        async with open_session(URL, name="closed"):
            pass
    left = [
        one for one in gc.get_objects() if type(one) is aio_pika.Connection and one.url.query.get("name") == "closed"
    ]
    assert left, held
    assert all(one.is_closed for one in left)
