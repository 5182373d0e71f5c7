"""How long a RabbitMQ lets a message be held: what its consumers ask for, or what its settings say."""

from __future__ import annotations

from typing import Any

import pytest

from swarmq.broker import topology
from swarmq.broker.consumer import find_ack_limit_s

WEEK_S = 7 * 24 * 3600


@pytest.mark.parametrize(
    ("server", "limit_s"),
    [
        ({"version": "3.12.0"}, WEEK_S),
        ({"version": "4.3.6"}, WEEK_S),
        ({"version": "3.10.8"}, 1800),
        ({"version": "3.10.8", topology.ACK_TIMEOUT_PROPERTY: 604800000}, WEEK_S),
        ({"version": "3.11.28", topology.ACK_TIMEOUT_PROPERTY: 7200000}, 7200),
        ({"version": "3.10.8", topology.ACK_TIMEOUT_PROPERTY: "long"}, 1800),
        ({"version": "unknown"}, 1800),
        ({}, 1800),
    ],
)
def test_the_limit_is_what_the_consumer_asks_for_where_that_is_heeded(server: dict[str, Any], limit_s: float) -> None:
    assert find_ack_limit_s(server, WEEK_S, 1800) == limit_s


def test_a_consumer_asks_for_a_week() -> None:
    assert topology.ACK_S == WEEK_S
    assert topology.consumer_arguments(WEEK_S) == {"x-consumer-timeout": WEEK_S * 1000}
