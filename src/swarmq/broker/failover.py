"""The order in which a process tries the nodes of a RabbitMQ cluster.

Every connection starts at a random node, which spreads the load over the cluster. Nodes that failed lately are tried last, so that a
node which does not answer delays only the first connection, not every one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from swarmq.runtime.amqp_urls import redact_node
from swarmq.runtime.logs import log

AVOID_S = 60.0
"""Seconds for which a node that failed is tried last."""


class NodeFailures:
    """The nodes that failed lately, shared by all connections of this process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._failed_at: dict[str, float] = {}
        self._unreachable: set[str] = set()
        """Nodes whose failure was logged."""

    def order(self, nodes: Iterable[str]) -> list[str]:
        """Return the URLs in the order in which to try them: shuffled, then those that failed in the last AVOID_S, the oldest
        failure first."""
        since = self._clock() - AVOID_S
        shuffled = list(nodes)
        self._rng.shuffle(shuffled)
        return sorted(shuffled, key=lambda node: at if (at := self._failed_at.get(node, since)) > since else since)

    def add(self, node: str) -> None:
        """Record that a node could not be reached, or that its session was lost."""
        self._failed_at[node] = self._clock()

    def skip(self, node: str, reason: str) -> None:
        """Log once that a node was skipped and another one is used instead."""
        if node not in self._unreachable:
            self._unreachable.add(node)
            log.warning("broker_node_unreachable", node=redact_node(node), reason=reason, action="other nodes are used")

    def remove(self, node: str) -> None:
        """Record that a node has opened a session."""
        self._failed_at.pop(node, None)
        if node in self._unreachable:
            self._unreachable.remove(node)
            log.info("broker_node_reachable", node=redact_node(node))
