"""The private node: survives restarts, dies with its parent, and says why it does not start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.errors import BrokerError
from swarmq.messages import EpisodeEnd

pytestmark = [pytest.mark.broker, pytest.mark.asyncio(loop_scope="module")]

CHILD = """
import asyncio, pathlib, sys
from swarmq.broker.node.process import PrivateNode

async def main():
    async with PrivateNode(pathlib.Path(sys.argv[1])) as node:
        print("pids", *node.pids, flush=True)
        await node.wait()

asyncio.run(main())
"""


async def test_a_node_started_again_is_the_same_broker_with_its_data(tmp_path: Path, run_name: str) -> None:
    message = EpisodeEnd(run=run_name, episode_id="e", status="aborted")
    async with PrivateNode(tmp_path) as node:
        before = (node.amqp_url, node.identity.management_url)
        async with AmqpBroker.open(node.amqp_url, name="x", deadline_s=120.0) as broker:
            await broker.declare(run_name, policies=["main"], kinds=["math"])
            await broker.publish(topology.inbox(run_name), message)
    async with PrivateNode(tmp_path) as node:
        assert (node.amqp_url, node.identity.management_url) == before
        async with (
            AmqpBroker.open(node.amqp_url, name="x", deadline_s=120.0) as broker,
            broker.consume(topology.inbox(run_name), prefetch=1) as deliveries,
        ):
            assert (await anext(deliveries)).message == message


async def test_two_nodes_live_side_by_side_on_loopback_alone(node: PrivateNode, broker_node: PrivateNode) -> None:
    assert node.amqp_url != broker_node.amqp_url
    for pid in (*node.pids, *broker_node.pids):
        assert set(addresses := listening_addresses(pid)) <= {"127.0.0.1", "::1"}
        assert addresses


async def test_secrets_are_readable_by_their_owner_alone(node: PrivateNode) -> None:
    for name in ("", "node.json", "rabbitmq.conf", "home", "home/.erlang.cookie"):
        assert (node.folder / name).stat().st_mode & 0o077 == 0, name


async def test_a_folder_in_use_is_refused_and_its_holder_named(node: PrivateNode) -> None:
    with pytest.raises(BrokerError, match=f"in use by process {os.getpid()}"):
        await PrivateNode(node.folder).start()


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=rf"port {port} is taken.*broker\.port"):
            await PrivateNode(tmp_path, port=port).start()


async def test_a_node_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"ended while starting.*no_such_setting"):
        await PrivateNode(tmp_path, config="no_such_setting = 1\n").start()
    async with PrivateNode(tmp_path):  # and leaves nothing in the way
        pass


async def test_without_a_server_the_ways_to_get_one_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SWARMQ_RABBITMQ_HOME", str(tmp_path))
    with pytest.raises(BrokerError, match=r"SWARMQ_RABBITMQ_HOME=.* has no sbin/rabbitmq-server"):
        await PrivateNode(tmp_path / "node").start()


async def test_a_node_ends_with_its_parent_even_by_sigkill(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(tmp_path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert parent.stdout is not None
    while not (line := await parent.stdout.readline()).startswith(b"pids"):
        assert line, "ended before the node was up"
    children = [int(pid) for pid in line.split()[1:]]
    assert len(children) == 2
    watched = [os.pidfd_open(pid) for pid in children]
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    for fd in watched:
        await ended(fd)
        os.close(fd)


async def ended(pidfd: int) -> None:
    """A pidfd becomes readable when its process ends."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, over.set)
    await over.wait()
    loop.remove_reader(pidfd)


def listening_addresses(pid: int) -> list[str]:
    """Addresses on which a process listens, from /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # closed since it was listed
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.append(socket.inet_ntop(family, raw))
    return found
