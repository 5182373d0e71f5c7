"""A private broker is started again when it no longer serves, also where its process lives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from swarmq.broker.node.process import PrivateNode
from swarmq.up import supervision
from swarmq.up.supervision import keep_broker


class Node:
    """A node whose process lives."""

    def __init__(self, folder: Path, *, deaf: bool = False) -> None:
        self.folder, self.deaf = folder, deaf
        self.asked = 0
        self.happened: list[str] = []
        self.started = asyncio.Event()

    async def wait(self) -> int:
        return await asyncio.get_running_loop().create_future()

    async def refuses_connections(self) -> bool:
        self.asked += 1
        return self.deaf

    async def stop(self) -> None:
        self.happened.append("stop")

    async def start(self) -> None:
        self.happened.append("start")
        self.deaf = False
        self.started.set()


def has_room(_folder: Path) -> int:
    return supervision.START_BYTES


async def test_one_that_takes_no_connections_is_started_again(tmp_path: Path) -> None:
    node, told = Node(tmp_path, deaf=True), list[str]()
    keeper = asyncio.create_task(
        keep_broker(cast("PrivateNode", node), told.append, check_every_s=0.001, free_bytes=has_room)
    )
    async with asyncio.timeout(30):
        await node.started.wait()
        assert node.asked == supervision.MAX_FAILED_CHECKS
        while node.asked < 3 * supervision.MAX_FAILED_CHECKS:  # noqa: ASYNC110 - it is looked at
            await asyncio.sleep(0.001)
    keeper.cancel()
    assert node.happened == ["stop", "start"]
    (line,) = told
    assert line.startswith("the broker has accepted no connections for ")
    assert line.endswith("although its process is alive; restarting")


async def test_one_whose_disk_is_full_is_stopped_until_there_is_room(tmp_path: Path) -> None:
    node, told = Node(tmp_path), list[str]()
    free = [0]
    waits = asyncio.Event()

    def warn(text: str) -> None:
        told.append(text)
        if "waits" in text:
            waits.set()

    keeper = asyncio.create_task(
        keep_broker(cast("PrivateNode", node), warn, check_every_s=0.001, free_bytes=lambda _: free[0])
    )
    async with asyncio.timeout(30):
        await waits.wait()
        await asyncio.sleep(0.01)
        assert node.happened == ["stop"]
        free[0] = supervision.START_BYTES
        await node.started.wait()
    keeper.cancel()
    assert told[0] == "the broker has a full disk; restarting"
    assert told[1].startswith(f"the broker waits for disk space: {tmp_path} has ")
    assert len(told) == 2
