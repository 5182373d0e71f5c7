"""A RabbitMQ node of a cluster whose nodes are on several machines, as docs/how-to/several-hosts.md sets one up.

    python -m benchmarks.hosts.rabbitmq FOLDER ADDRESS FIRST_ADDRESS PASSWORD

Nodes are named by address, and find the first one by it. A node that has accepted clients and then refuses them for `REFUSES_S`
seconds is ended, for its supervisor to start it again: RabbitMQ 3.10 can stay paused after a partition.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from swarmq.broker.node import probe
from swarmq.broker.node.files import ACK_TIMEOUT_MS, ADVANCED_CONFIG, CLUSTER_CONFIG, COOKIE
from swarmq.broker.node.install import find_server
from swarmq.runtime.processes import die_with_parent

USER = "swarmq"
AMQP_PORT, MANAGEMENT_PORT = 5672, 15672
REFUSES_S, LOOK_S = 30.0, 2.0
TICK_S = 12
"""Seconds after which a node takes another for lost that does not answer; 60 by default."""
CONFIG = """\
listeners.tcp.1 = {address}:{amqp_port}
management.tcp.ip = {address}
management.tcp.port = {management_port}
default_user = {user}
default_pass = {password}
loopback_users = none
consumer_timeout = {ack_timeout_ms}
vm_memory_high_watermark.absolute = 1000MB
disk_free_limit.absolute = 50MB
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = rabbit@{first}
cluster_formation.discovery_retry_limit = 1000
"""


async def serve(folder: Path, address: str, first: str, password: str) -> int:
    server = find_server()
    assert server, "no RabbitMQ server on this machine: `make install`"
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    config = CONFIG.format(
        address=address,
        first=first,
        user=USER,
        password=password,
        amqp_port=AMQP_PORT,
        management_port=MANAGEMENT_PORT,
        ack_timeout_ms=ACK_TIMEOUT_MS,
    )
    (folder / "rabbitmq.conf").write_text(config + CLUSTER_CONFIG)
    (folder / "advanced.config").write_text(ADVANCED_CONFIG)
    (folder / "enabled_plugins").write_text("[rabbitmq_management].")
    if not (home / COOKIE).exists():
        (home / COOKIE).write_text(password)
        (home / COOKIE).chmod(0o400)
    process = await asyncio.create_subprocess_exec(
        server.home / "sbin/rabbitmq-server",
        env={
            "PATH": f"{server.erlang_bin}:{os.environ['PATH']}",
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            "RABBITMQ_NODENAME": f"rabbit@{address}",
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-kernel net_ticktime {TICK_S}",
            "RABBITMQ_BASE": str(folder),
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_LOGS": f"{folder}/log/node.log",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/env.conf",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{folder}/gen",
            "RABBITMQ_FEATURE_FLAGS_FILE": f"{folder}/feature_flags",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server
        },
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
