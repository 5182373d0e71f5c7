"""Fixtures for all tests: one private RabbitMQ for the session, and names that no other test uses."""

from __future__ import annotations

import gc
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from support.broker import BackgroundCluster, SharedBroker
    from swarmq.broker.node.process import PrivateNode

# What libraries make while they load stays to the end: looking through it for garbage takes seconds.
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite started in the background inherits this, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Enough to catch a broken claim within a second or two, the same every time; HYPOTHESIS_PROFILE=thorough searches for the
# rare ones.
# A busy machine makes drawing examples slow, which is no fault of theirs.
ANYWHERE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", ANYWHERE, max_examples=30, derandomize=True)
settings.register_profile("thorough", ANYWHERE, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

FOLDERS = ("contract", "integration", "e2e")
"""Of tests that share a broker."""
SHARED: pytest.StashKey[SharedBroker] = pytest.StashKey()
SERVED = (
    "tests/integration/proxy/",
    "tests/integration/hosts/",
    "tests/integration/engine/test_guard.py",
    "tests/integration/engine/test_push.py",
    "tests/integration/learner/test_served_teacher.py",
)
"""Of tests that share an engine."""
CLUSTERED = ("tests/contract/test_broker.py", "tests/integration/broker/test_cluster.py")
"""Of tests that share a cluster."""
WHOLLY_SLOW = "\npytestmark = pytest.mark.slow\n"
SLOW = "mark.slow"
"""In every file that has a slow test."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, files that hold nothing else are not even imported: some take seconds. Nor are those
    without one where they alone are asked for."""
    if collection_path.suffix == ".py" and (asked := config.option.markexpr) in {"slow", "not slow"}:
        text = collection_path.read_text()
        return (WHOLLY_SLOW in text if asked == "not slow" else SLOW not in text) or None
    return None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but one worker has all files that share the engine, or the cluster: each worker would start its own."""
    from xdist.scheduler import LoadFileScheduling

    class LoadServed(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = {"engine": SERVED, "cluster": CLUSTERED}
            return next(
                (name for name, files in shared.items() if nodeid.startswith(files)), super()._split_scope(nodeid)
            )

    return LoadServed(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    if "SWARMQ_TEST_AMQP_URL" not in os.environ and any(name in arg for arg in config.args for name in FOLDERS):
        from support.broker import SharedBroker

        config.stash[SHARED] = broker = SharedBroker()
        config.add_cleanup(broker.stop)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if broker := node.config.stash.get(SHARED, None):
        node.workerinput["shared broker"] = str(broker.folder)


@pytest.fixture(scope="session")
def broker_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """A private RabbitMQ for the session of this process. Tests that break a broker start one of their own."""
    from support.broker import background_node

    with background_node(tmp_path_factory.mktemp("rabbitmq")) as (node, started):
        started.result()
        yield node


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundCluster]:
    """A private RabbitMQ cluster of three nodes for the session of this process; each test leaves it as it was."""
    from support.broker import background_cluster

    with background_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def amqp_url(request: pytest.FixtureRequest) -> str:
    """A RabbitMQ to share: $SWARMQ_TEST_AMQP_URL if set, else the workers' one, else the private node."""
    if url := os.environ.get("SWARMQ_TEST_AMQP_URL"):
        return url
    if folder := getattr(request.config, "workerinput", {}).get("shared broker"):
        from support.broker import shared_url

        return shared_url(Path(folder))
    return request.getfixturevalue("broker_node").amqp_url


@pytest.fixture
def run_name() -> str:
    """A run that no other test uses."""
    return f"t-{secrets.token_hex(4)}"
