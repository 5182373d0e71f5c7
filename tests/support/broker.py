"""One private RabbitMQ for a test session.

With several workers it belongs to the process that directs them: it starts while they still collect, once for all.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aio_pika

from swarmq.broker.node.cluster import PrivateCluster
from swarmq.broker.node.process import PrivateNode
from swarmq.config import BrokerSettings

T = TypeVar("T")
Broker = TypeVar("Broker", PrivateNode, PrivateCluster)
URL = "amqp-url"
START_S = 600.0


class SharedBroker:
    """Starts in the background; `folder/amqp-url` exists once it takes clients."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="swarmq-tests-"))
        self._running = ExitStack()
        self._node, started = self._running.enter_context(background_node(self.folder / "rabbitmq"))
        started.add_done_callback(self._write_url)

    def stop(self) -> None:
        self._running.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_url(self, started: Future[None]) -> None:
        """Write the URL for the workers, or why there is none."""
        error = started.exception()
        part = self.folder / "part"
        part.write_text(f"no broker: {error}" if error else self._node.amqp_url)
        part.rename(self.folder / URL)


def shared_url(folder: Path) -> str:
    """What a SharedBroker of another process says. Raises RuntimeError: it did not start."""
    until = time.monotonic() + START_S
    while not (folder / URL).exists():
        if time.monotonic() > until:
            raise RuntimeError(f"the shared RabbitMQ did not start within {START_S:.0f} s")
        time.sleep(0.05)
    if not (url := (folder / URL).read_text()).startswith("amqp"):
        raise RuntimeError(url)
    return url


@asynccontextmanager
async def discarded(broker: Broker) -> AsyncIterator[Broker]:
    """Run a broker whose data nobody needs in the end: it is killed, because RabbitMQ 3.10 takes six seconds to stop."""
    await broker.start()
    try:
        yield broker
    finally:
        await broker.kill()


@contextmanager
def background_node(folder: Path) -> Iterator[tuple[PrivateNode, Future[None]]]:
    """A node on an event loop of its own, because tests have theirs, and when it has started."""
    node = PrivateNode(folder)
    with _background(node) as (_, started):
        yield node, started


class BackgroundCluster:
    """A cluster of three nodes on an event loop of its own, to which `do` hands on what a test does to a node."""

    def __init__(self, cluster: PrivateCluster, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster = cluster
        self._loop = loop

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


@contextmanager
def background_cluster(folder: Path) -> Iterator[BackgroundCluster]:
    cluster = PrivateCluster(folder, BrokerSettings(nodes=3))
    with _background(cluster) as (loop, started):
        started.result()
        yield BackgroundCluster(cluster, loop)


@contextmanager
def _background(
    broker: PrivateNode | PrivateCluster,
) -> Iterator[tuple[asyncio.AbstractEventLoop, Future[None]]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rabbitmq")
    thread.start()
    started = asyncio.run_coroutine_threadsafe(broker.start(), loop)
    try:
        yield loop, started
    finally:
        started.exception()  # a start is not cut short: its children are known when it is done
        # as in `discarded`
        asyncio.run_coroutine_threadsafe(broker.kill(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def is_refused(amqp_url: str, act: Callable[[aio_pika.abc.AbstractChannel], Awaitable[object]]) -> bool:
    """Whether the broker refuses what `act(channel)` does as the user in this url."""
    connection = await aio_pika.connect(amqp_url)
    try:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        try:
            async with asyncio.timeout(120):
                await act(channel)
        except aio_pika.exceptions.ChannelClosed as error:
            return "ACCESS_REFUSED" in str(error)
        return False
    finally:
        await connection.close()
