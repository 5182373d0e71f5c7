"""A run whose other host is a process in an empty folder, with an invite that reaches RabbitMQ through a relay."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession

from support.engine import SECRET
from support.proxy import Agent
from swarmq import keys
from swarmq.broker.admin.hosts import add_host
from swarmq.broker.admin.invitations import ClientAddresses
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import AmqpBroker
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.engine.auth import SECRET_ENV
from swarmq.registries.clients import ClientRegistry
from swarmq.registries.proxies import ProxyRegistry
from swarmq.testing.relay import TcpRelay


class World:
    """A run with its collector in the test's process, and an invite that reaches its RabbitMQ through `relay`."""

    def __init__(self, job, relay, invite_file, tmp_path):
        self.job, self.relay, self.invite_file = job, relay, invite_file
        self.folder = tmp_path / "other-host"
        self.folder.mkdir()
        self.environment = {name: value for name, value in os.environ.items() if name != SECRET_ENV}
        self.proxies = ProxyRegistry(job.run_folder.proxies)
        self.root = keys.load_root(job.run_folder.root_secret)

    def revoke(self, client):
        with ClientRegistry.open(self.job.run_folder.clients) as clients:
            clients.remove(client, now=time.time())

    @asynccontextmanager
    async def command(self, *arguments):
        """The process of `swarmq ARGUMENTS` in an empty folder; `--join` gets the invite."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarmq", *arguments, "--join", str(self.invite_file)),
            cwd=self.folder,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def output(self, *arguments):
        """The words of each line that `swarmq ARGUMENTS` prints on the run's own host, without the heading."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarmq", *arguments),
            env=self.environment | {SECRET_ENV: SECRET, "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
        return [line.split() for line in printed.decode().splitlines()[1:]]

    @asynccontextmanager
    async def agent(self, url):
        async with ClientSession() as http:
            yield Agent(url.removesuffix("/v1"), self.job.run, http)

    def key(self, agent, client):
        return agent.key(f"e-{client}", client=client, root=self.root)


@pytest.fixture
async def world(tmp_path, run_name, broker_node, engine_url, tiny_model, monkeypatch):
    monkeypatch.setenv(SECRET_ENV, SECRET)
    policy = {"model": str(tiny_model), "engine": {"urls": [engine_url]}, "sampling": {"max_tokens": 8}}
    tree = {"run": run_name, "folder": str(tmp_path / "runs"), "mix": {"math": 1.0}, "policies": {"main": policy}}
    proxy = {"confirm_timeout_s": 600.0}  # for a busy machine
    job = SwarmJob.build(tree | {"broker": {"url": broker_node.amqp_url}, "proxy": proxy})
    management = ManagementApi.of(broker_node.amqp_url, broker_node.identity.management_login)
    async with (
        TcpRelay.to("127.0.0.1", urlsplit(broker_node.amqp_url).port) as relay,
        AmqpBroker.open(broker_node.amqp_url, name="test collector", deadline_s=600.0) as broker,
        asyncio.TaskGroup() as tasks,
    ):
        reach = ClientAddresses(amqp=f"amqp://127.0.0.1:{relay.port}/")
        invite = await asyncio.to_thread(add_host, job, job.run_folder, "gpu2", management, reach, hours=1)
        (tmp_path / "gpu2.invite").write_text(f"{invite.encode()}\n")
        job.run_folder.resolved.write_text(job.to_toml())
        stop = asyncio.Event()
        tasks.create_task(Collector(job, broker, Store(None, run=job.run)).run(stop))
        yield World(job, relay, tmp_path / "gpu2.invite", tmp_path)
        stop.set()


async def logged(process, event) -> dict[str, str]:
    """The fields of the next log line with this event."""
    seen = []
    async with asyncio.timeout(600):
        async for line in process.stderr:
            seen.append(line)
            if f'"{event}"'.encode() in line:
                return json.loads(line)
    raise AssertionError(f"it ended before it was {event}: {b''.join(seen)}")
