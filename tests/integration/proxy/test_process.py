"""`swarmq-proxy` as a process: it serves, drains on SIGTERM with status 0, and says clearly why it cannot start."""

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientConnectorCertificateError, ClientSession, TCPConnector

from support.engine import SECRET
from support.proxy import Agent
from support.tls import self_signed
from swarmq import keys
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.config import SwarmJob
from swarmq.engine.auth import SECRET_ENV
from swarmq.messages import Turn
from swarmq.registries.proxies import ProxyRegistry

pytestmark = [pytest.mark.vllm, pytest.mark.broker]


@pytest.fixture
def job_file(tmp_path, run_name, amqp_url, engine_url, tiny_model):
    policy = {"model": str(tiny_model), "engine": {"urls": [engine_url]}, "sampling": {"max_tokens": 16}}
    tree = {"run": run_name, "folder": str(tmp_path), "policies": {"main": policy}, "broker": {"url": amqp_url}}
    tree["proxy"] = {"confirm_timeout_s": 600.0}  # for a busy machine
    path = tmp_path / "resolved.toml"
    path.write_text(SwarmJob.build(tree).to_toml())
    return path


@asynccontextmanager
async def started(job_file, *arguments):
    program = "import sys; from swarmq.cli import proxy; sys.argv[0] = 'swarmq-proxy'; proxy()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, str(job_file), *arguments),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {BROKER_ANSWERED_ENV: "1", SECRET_ENV: SECRET},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_proxy_process_serves_and_drains(job_file):
    async with started(job_file) as process:
        url = await _listening(process)
        job = SwarmJob.load(job_file)
        async with ClientSession() as http:
            agent = Agent(url.removesuffix("/v1"), job.run, http)
            key = agent.key(root=keys.load_root(job.run_folder.root_secret))
            answer = await agent.ask({"role": "user", "content": "hello"}, key=key)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(600):
            assert await process.wait() == 0
    assert answer["usage"]["completion_tokens"] <= 16


async def test_its_turns_are_in_the_inbox(job_file, amqp_url):
    job = SwarmJob.load(job_file)
    async with (
        started(job_file) as process,
        AmqpBroker.open(amqp_url, name="test", deadline_s=None) as broker,
        ClientSession() as http,
    ):
        agent = Agent((await _listening(process)).removesuffix("/v1"), job.run, http)
        key = agent.key(root=keys.load_root(job.run_folder.root_secret))
        answer = await agent.ask({"role": "user", "content": "hello"}, key=key)
        async with broker.consume(topology.inbox(job.run), prefetch=1) as deliveries:
            delivery = await anext(deliveries)
    assert isinstance(delivery.message, Turn)
    assert delivery.message.call_id == answer["id"]


async def test_it_speaks_https_with_its_own_certificate(job_file, tmp_path):
    tls = self_signed(tmp_path)
    files = [f"proxy.{name}={tls / file}" for name, file in (("certificate", "cert.pem"), ("key", "key.pem"))]
    async with started(job_file, *(word for one in files for word in ("--set", one))) as process:
        url = await _listening(process)
        assert url.startswith("https://")
        job, trusted = SwarmJob.load(job_file), ssl.create_default_context(cafile=tls / "cert.pem")
        async with ClientSession(connector=TCPConnector(ssl=trusted)) as http:
            agent = Agent(url.removesuffix("/v1"), job.run, http)
            answer = await agent.ask(
                {"role": "user", "content": "hello"}, key=agent.key(root=keys.load_root(job.run_folder.root_secret))
            )
            assert answer["usage"]["completion_tokens"] >= 1
        async with ClientSession() as http:
            with pytest.raises(ClientConnectorCertificateError):
                await http.get(url)


async def test_a_proxy_that_joins_a_run_is_in_its_list_until_it_is_told_to_leave(job_file):
    job = SwarmJob.load(job_file)
    proxies = ProxyRegistry(job.run_folder.proxies)
    proxies.write(["http://127.0.0.1:1/v1"])
    async with started(job_file, "--join") as process:
        url = await _until(process, "joined")
        assert proxies.urls() == ("http://127.0.0.1:1/v1", url)
        process.send_signal(signal.SIGTERM)
        assert await _until(process, "leaving") == url
        assert proxies.urls() == ("http://127.0.0.1:1/v1",)
        async with ClientSession() as http:
            agent = Agent(url.removesuffix("/v1"), job.run, http)
            key = agent.key(root=keys.load_root(job.run_folder.root_secret))
            answer = await agent.ask({"role": "user", "content": "hello"}, key=key)
            assert answer["usage"]["completion_tokens"] >= 1, "who has begun here is served"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(600):
            assert await process.wait() == 0


async def test_a_taken_port_is_one_clear_line(job_file):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with started(job_file, "--port", str(taken.getsockname()[1])) as process:
            assert process.stderr
            line = (await process.stderr.read()).decode().strip()
            assert await process.wait() == 1
    assert "proxy.port" in line
    assert "Traceback" not in line


async def _listening(process) -> str:
    return await _until(process, "listening")


async def _until(process, event) -> str:
    """The url it logs with this event."""
    async with asyncio.timeout(600):
        async for line in process.stderr:
            if f'"{event}"'.encode() in line:
                return json.loads(line)["url"]
    raise AssertionError(f"it ended before it was {event}")
