"""The private RabbitMQ of a run: one node, or several nodes on this host that form a cluster.

    PrivateCluster ──> node1 <──join── node2, node3    (folders, names, ports and data of their own)
                   └─> NameServer                      (shared: nodes find each other through it)

A cluster on one host serves to try out what happens when nodes die: a queue stays available while most of its nodes are up. It
does not survive the loss of the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Self

from swarmq.broker.node.files import CLUSTER_CONFIG, NodeIdentity, list_node_folders, render_tls_listener
from swarmq.broker.node.process import NameServer, PrivateNode
from swarmq.config import BrokerSettings
from swarmq.errors import BrokerError
from swarmq.runtime.wording import count_of


class PrivateCluster:
    """The run's RabbitMQ nodes. `async with PrivateCluster(folder, settings) as cluster:` runs `settings.nodes` of them at
    `cluster.amqp_url`."""

    def __init__(self, folder: Path, settings: BrokerSettings) -> None:
        self.folder = folder
        self._names = NameServer()
        self.nodes: list[PrivateNode] = []
        for number in range(settings.nodes):
            node = partial(PrivateNode, port=settings.port and settings.port + number)
            config = render_tls_listener(settings, number=number)
            if settings.nodes == 1:
                self.nodes.append(node(folder, config=config))
            else:
                joins = self.nodes[0] if self.nodes else None
                path = folder / f"node{number + 1}"
                self.nodes.append(node(path, config=config + CLUSTER_CONFIG, names=self._names, joins=joins))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def amqp_url(self) -> str:
        return ",".join(node.amqp_url for node in self.nodes)

    @property
    def identity(self) -> NodeIdentity:
        """Identity of the first node; all nodes have its user and password."""
        return self.nodes[0].identity

    @property
    def management_login(self) -> str:
        """URLs of the management API, with user and password."""
        return ",".join(node.identity.management_login for node in self.nodes)

    async def start(self) -> None:
        """Start all nodes and return when each accepts clients. Raises BrokerError, and then leaves none running.

        A node that starts again waits for the other nodes that have data, so these start together. A new node can only join a
        running one.
        """
        size = len(self.nodes)
        before = len(list_node_folders(self.folder)) or (1 if (self.folder / "node.json").exists() else size)
        if before != size:
            raise BrokerError(
                f"the private RabbitMQ in {self.folder} has {count_of(before, 'node')}, and broker.nodes is {size}: the number cannot "
                f"change later; set broker.nodes to {before}, or start a run with another name"
            )
        for node in self.nodes:
            node.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = [node for node in self.nodes if node is self.nodes[0] or node.has_data]
        try:
            await _start_all(old)
            await _start_all(node for node in self.nodes if node not in old)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))
        await self._names.stop()

    async def kill(self) -> None:
        """Kill all nodes with SIGKILL; `start` starts them again with their data."""
        await asyncio.gather(*(node.kill() for node in self.nodes))
        await self._names.stop()


async def _start_all(nodes: Iterable[PrivateNode]) -> None:
    """Start nodes concurrently. Raises the first error once all have started or failed."""
    results = await asyncio.gather(*(node.start() for node in nodes), return_exceptions=True)
    for result in results:
        if result is not None:
            raise result
