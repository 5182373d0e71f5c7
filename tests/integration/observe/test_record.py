"""Recording of a run on a real RabbitMQ: by a process of its own, and over a line that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from swarmq.broker.amqp import AmqpBroker
from swarmq.config import SwarmJob
from swarmq.messages import Event
from swarmq.observe.recorder import Intervals, record_run
from swarmq.testing.relay import TcpRelay

pytestmark = pytest.mark.broker


def job(folder: Path, run: str, url: str) -> SwarmJob:
    made = SwarmJob.build(
        {"run": run, "folder": str(folder), "policies": {"main": {"model": "m"}}, "broker": {"url": url}}
    )
    made.run_folder.path.mkdir()
    return made


def read_board(settings: SwarmJob) -> Any:
    path = settings.run_folder.board
    return msgspec.json.decode(path.read_bytes()) if path.exists() else {"broker": {"state": ""}, "parts": {}}


async def until_state(settings: SwarmJob, state: str) -> Any:
    async with asyncio.timeout(120):
        while (board := read_board(settings))["broker"]["state"] != state:  # noqa: ASYNC110 - files have no events
            await asyncio.sleep(0.05)
    return board


async def test_a_process_of_its_own_records_until_it_is_stopped(broker_node, run_name, tmp_path):
    settings = job(tmp_path, run_name, broker_node.amqp_url)
    settings.run_folder.resolved.write_text(settings.to_toml())
    management = broker_node.identity.management_login
    async with AmqpBroker.open(broker_node.amqp_url, name="test", deadline_s=120.0) as broker:
        await broker.declare(run_name, policies=["main"], kinds=["default"])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarmq", "record", str(settings.run_folder.resolved)),
            env=os.environ | {"SWARMQ_MANAGEMENT_URL": management},
        )
        try:
            await until_state(settings, "ok")
            async with asyncio.timeout(120):
                while "collector" not in (board := read_board(settings))["parts"]:
                    await broker.emit(
                        Event(run=run_name, source="collector", name="state", at=time.time(), fields={"begun": 1})
                    )
                    await asyncio.sleep(0.1)
                while read_board(settings)["queue_details"][f"swarmq.{run_name}.in"]["oldest_s"] is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            process.send_signal(signal.SIGTERM)
            status = await process.wait()
    assert status == 0
    assert board["recorder"]["pid"] == process.pid
    assert not read_board(settings)["recorder"]["is_recording"]
    assert settings.run_folder.board.stat().st_mode & 0o077 == 0


async def test_a_broker_that_cannot_be_reached_is_away_and_comes_back(broker_node, run_name, tmp_path):
    address = urlsplit(broker_node.amqp_url)
    every = Intervals(board_s=0.05, away_s=3.0)
    async with TcpRelay.to(address.hostname, address.port) as relay:
        url = broker_node.amqp_url.replace(f":{address.port}", f":{relay.port}")
        settings = job(tmp_path, run_name, url)
        async with (
            AmqpBroker.open(url, name="test", deadline_s=120.0) as broker,
            record_run(settings, broker, intervals=every),
        ):
            await until_state(settings, "ok")
            relay.cut(refuse=True)
            board = await until_state(settings, "away")
            assert board["recorder"]["is_recording"], "the files say so while it is away"
            relay.release()
            await until_state(settings, "ok")
