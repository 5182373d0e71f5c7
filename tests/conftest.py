"""Fixtures for all tests: one private RabbitMQ for the session, and names that no other test uses."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from swarmq.broker.node import PrivateNode

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite started in the background inherits this, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Enough to catch a broken claim within a second or two; HYPOTHESIS_PROFILE=thorough searches for the rare ones.
# A busy machine makes drawing examples slow, which is no fault of theirs.
ANYWHERE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", ANYWHERE, max_examples=30, derandomize="CI" in os.environ)
settings.register_profile("thorough", ANYWHERE, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


WHOLLY_SLOW = "\npytestmark = pytest.mark.slow\n"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, files that hold nothing else are not even imported: some take seconds."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        return WHOLLY_SLOW in collection_path.read_text() or None
    return None


@pytest.fixture(scope="session")
def broker_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """A private RabbitMQ for the whole session. Tests that break a broker start one of their own."""
    from swarmq.broker.node import PrivateNode

    node = PrivateNode(tmp_path_factory.mktemp("rabbitmq"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rabbitmq")  # tests have loops of their own
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(node.start(), loop).result()
        yield node
        asyncio.run_coroutine_threadsafe(
            node.kill(), loop
        ).result()  # nobody needs its data: no six seconds of farewell
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def amqp_url(request: pytest.FixtureRequest) -> str:
    """A RabbitMQ to share: $SWARMQ_TEST_AMQP_URL if set, else the private node."""
    return os.environ.get("SWARMQ_TEST_AMQP_URL") or request.getfixturevalue("broker_node").amqp_url


@pytest.fixture
def run_name() -> str:
    """A run that no other test uses."""
    return f"t-{secrets.token_hex(4)}"
