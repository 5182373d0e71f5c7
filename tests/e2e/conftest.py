"""What end-to-end tests have in common."""

from __future__ import annotations

import pytest

from swarmq.broker.amqp import BROKER_ANSWERED_ENV


@pytest.fixture(autouse=True)
def brokers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts knows that its broker's address is right, and on a busy machine that may take to answer."""
    monkeypatch.setenv(BROKER_ANSWERED_ENV, "1")
