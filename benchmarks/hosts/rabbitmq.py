"""A RabbitMQ node of a cluster whose nodes are on several machines, as docs/how-to/several-hosts.md sets one up.

    python -m benchmarks.hosts.rabbitmq FOLDER ADDRESS FIRST_ADDRESS PASSWORD

Nodes are named by address, and find the first one by it. A node that has accepted clients and then refuses them for `REFUSES_S`
seconds is ended, for its supervisor to start it again: RabbitMQ 3.10 can stay paused after a partition.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from swarmq.broker.node import probe
from swarmq.broker.node.files import (
    ADVANCED_CONFIG,
    CLUSTER_CONFIG,
    NodeIdentity,
    build_environment,
    write_node_files,
)
from swarmq.broker.node.install import find_server
from swarmq.runtime.processes import die_with_parent

USER = "swarmq"
AMQP_PORT, MANAGEMENT_PORT, DIST_PORT, EPMD_PORT = 5672, 15672, 25672, 4369
REFUSES_S, LOOK_S = 30.0, 2.0
TICK_S = 12
"""Seconds after which a node takes another for lost that does not answer; 60 by default."""
CONFIG = """\
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = rabbit@{first}
cluster_formation.discovery_retry_limit = 1000
"""


async def serve(folder: Path, address: str, first: str, password: str) -> int:
    server = find_server()
    assert server, "no RabbitMQ server on this machine: `make install`"
    identity = NodeIdentity(
        node=f"rabbit@{address}",
        user=USER,
        password=password,
        amqp_port=AMQP_PORT,
        management_port=MANAGEMENT_PORT,
        dist_port=DIST_PORT,
        epmd_port=EPMD_PORT,
    )
    config = CLUSTER_CONFIG + CONFIG.format(first=first)
    write_node_files(folder, identity, config=config, advanced=ADVANCED_CONFIG, cookie=password.encode(), host=address)
    between_hosts = {
        "ERL_EPMD_ADDRESS": address,
        "RABBITMQ_NODE_IP_ADDRESS": address,
        "RABBITMQ_USE_LONGNAME": "true",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-kernel net_ticktime {TICK_S}",
    }
    process = await asyncio.create_subprocess_exec(
        server.home / "sbin/rabbitmq-server",
        env=build_environment(folder, identity, server.erlang_bin) | between_hosts,
        cwd=folder,
        preexec_fn=die_with_parent,
    )
    watching = asyncio.create_task(_wait_for_refusal(address))
    ended = asyncio.create_task(process.wait())
    await asyncio.wait({watching, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        print(f"the node refuses clients for {REFUSES_S:g} s", flush=True)
        process.send_signal(signal.SIGKILL)
    watching.cancel()
    return await ended


async def _wait_for_refusal(address: str) -> None:
    """Return once the node has accepted clients, and then none for `REFUSES_S` seconds."""
    accepted_at: float | None = None
    while accepted_at is None or time.monotonic() - accepted_at < REFUSES_S:
        await asyncio.sleep(LOOK_S)
        if await probe.is_amqp_ready(address, AMQP_PORT):
            accepted_at = time.monotonic()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(Path(sys.argv[1]), *sys.argv[2:])))
