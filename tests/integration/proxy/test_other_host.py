"""`swarmq proxy --join INVITE`: a proxy that has nothing but an invite, as on a host that shares no disk with the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec
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
from swarmq.registries.hosts import read_hosts
from swarmq.registries.proxies import ProxyRegistry
from swarmq.testing.relay import TcpRelay

pytestmark = [pytest.mark.vllm, pytest.mark.broker]
HELLO = {"role": "user", "content": "hello"}


class World:
    """A run with its collector in the test's process, and an invite that reaches its RabbitMQ through `relay`."""

    def __init__(self, job, relay, invite_file, tmp_path):
        self.job, self.relay, self.invite_file = job, relay, invite_file
        self.folder = tmp_path / "other-host"
        self.folder.mkdir()
        self.proxies = ProxyRegistry(job.run_folder.proxies)
        self.root = keys.load_root(job.run_folder.root_secret)

    def revoke(self, client):
        with ClientRegistry.open(self.job.run_folder.clients) as clients:
            clients.remove(client, now=time.time())

    @asynccontextmanager
    async def proxy(self, *arguments):
        """The proxy's process, in an empty folder."""
        environment = {name: value for name, value in os.environ.items() if name != SECRET_ENV}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarmq", "proxy", "--join", str(self.invite_file), *arguments),
            cwd=self.folder,
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

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
    login = f"{broker_node.user}:{broker_node.password}"
    management = ManagementApi.of(broker_node.amqp_url, f"http://{login}@{broker_node.management_url[7:]}")
    async with (
        TcpRelay.to("127.0.0.1", urlsplit(broker_node.amqp_url).port) as relay,
        AmqpBroker.open(broker_node.amqp_url, name="test collector", deadline_s=600.0) as broker,
        asyncio.TaskGroup() as tasks,
    ):
        reach = ClientAddresses(amqp=f"amqp://127.0.0.1:{relay.port}/")
        invite = await asyncio.to_thread(add_host, job, job.run_folder, "gpu2", management, reach, hours=1)
        (tmp_path / "gpu2.invite").write_text(f"{invite.encode()}\n")
        stop = asyncio.Event()
        tasks.create_task(Collector(job, broker, Store(None, run=job.run)).run(stop))
        yield World(job, relay, tmp_path / "gpu2.invite", tmp_path)
        stop.set()


async def test_it_serves_with_the_invite_alone_and_leaves_nothing_behind(world):
    async with world.proxy() as process:
        url = (await _until(process, "joined"))["url"]
        assert world.proxies.urls() == (url,)
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].proxies == (url,)
        async with world.agent(url) as agent:
            answer = await agent.ask(HELLO, key=world.key(agent, "alice"))
            assert answer["usage"]["completion_tokens"] >= 1
            world.revoke("alice")
            async with asyncio.timeout(600):
                while (await agent.post({"model": "main", "messages": [HELLO]}, key=world.key(agent, "alice")))[
                    0
                ] != 401:
                    pass
            await agent.ask(HELLO, key=world.key(agent, "bob"))
        process.send_signal(signal.SIGTERM)
        await _until(process, "leaving")
        assert world.proxies.urls() == ()
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].proxies == ()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(600):
            assert await process.wait() == 0
    assert list(world.folder.iterdir()) == []


async def test_after_an_outage_it_refuses_clients_that_were_removed_meanwhile_from_the_first_call_on(world):
    async with world.proxy() as process, world.agent((await _until(process, "joined"))["url"]) as agent:
        await agent.ask(HELLO, key=world.key(agent, "alice"))
        world.relay.cut(refuse=True)
        await _until(process, "broker_session_lost")
        world.revoke("alice")
        body = {"model": "main", "messages": [HELLO]}
        calls = [asyncio.create_task(agent.post(body, key=world.key(agent, client))) for client in ("alice", "bob")]
        await asyncio.wait(calls, timeout=1.0)
        world.relay.release()
        (refused, _, why), (answered, _, _) = await asyncio.gather(*calls)
        assert (refused, answered) == (401, 200)
        assert b"'alice' was removed" in why


async def test_an_address_that_others_cannot_reach_and_an_expired_invite_are_one_clear_line(world, tmp_path):
    invite = keys.HostInvite.decode(world.invite_file.read_text())
    for arguments, text, why in [
        (["--host", "0.0.0.0"], invite.encode(), "http://0.0.0.0:"),
        (["--url", "http://nowhere.invalid:1/v1"], invite.encode(), "the name 'nowhere.invalid' resolves to nothing"),
        (["--url", "http://127.0.0.1:9/v1"], invite.encode(), "the run's host cannot connect to 127.0.0.1:9"),
        ([], msgspec.structs.replace(invite, expires_at=1.0).encode(), "expired at 1970-01-01"),
    ]:
        world.invite_file.write_text(text)
        async with world.proxy(*arguments) as process:
            line = (await process.stderr.read()).decode().strip().splitlines()[-1]
            assert await process.wait() == 1
        assert why in line
        assert "Traceback" not in line
    assert world.proxies.urls() == ()


async def _until(process, event) -> dict[str, str]:
    """The fields of the next log line with this event."""
    seen = []
    async with asyncio.timeout(600):
        async for line in process.stderr:
            seen.append(line)
            if f'"{event}"'.encode() in line:
                return json.loads(line)
    raise AssertionError(f"it ended before it was {event}: {b''.join(seen)}")
