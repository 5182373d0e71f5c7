"""`swarmq-proxy` as a process: it serves, drains on SIGTERM with status 0, and says clearly why it cannot start."""

import asyncio
import json
import signal
import socket
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession

from support.proxy import Agent
from swarmq import keys
from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.messages import Turn

pytestmark = [pytest.mark.vllm, pytest.mark.broker]


@pytest.fixture
def job_file(tmp_path, run_name, amqp_url, engine_url, tiny_model):
    policy = {"model": str(tiny_model), "engine": {"urls": [engine_url]}, "sampling": {"max_tokens": 16}}
    tree = {"run": run_name, "folder": str(tmp_path), "policies": {"main": policy}, "broker": {"url": amqp_url}}
    path = tmp_path / "resolved.toml"
    path.write_text(SwarmJob.build(tree).to_toml())
    return path


@asynccontextmanager
async def started(job_file, *arguments):
    program = "import sys; from swarmq.cli import proxy; sys.argv[0] = 'swarmq-proxy'; proxy()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(job_file), *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_serves_and_drains(job_file):
    async with started(job_file) as process:
        url = await _listening(process)
        job = SwarmJob.load(job_file)
        async with ClientSession() as http:
            agent = Agent(url.removesuffix("/v1"), job.run, http)
            key = agent.key(root=keys.load_root(job.run_folder.root_secret))
            answer = await agent.ask({"role": "user", "content": "hello"}, key=key)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            assert await process.wait() == 0
    assert answer["usage"]["completion_tokens"] <= 16


async def test_its_turns_are_in_the_inbox(job_file, amqp_url):
    from swarmq.broker.amqp import AmqpBroker

    job = SwarmJob.load(job_file)
    async with started(job_file) as process, AmqpBroker.open(amqp_url, name="test") as broker, ClientSession() as http:
        agent = Agent((await _listening(process)).removesuffix("/v1"), job.run, http)
        key = agent.key(root=keys.load_root(job.run_folder.root_secret))
        answer = await agent.ask({"role": "user", "content": "hello"}, key=key)
        async with broker.consume(topology.inbox(job.run), prefetch=1) as deliveries:
            delivery = await anext(deliveries)
    assert isinstance(delivery.message, Turn)
    assert delivery.message.call_id == answer["id"]


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
    """The url it logs once it listens."""
    async with asyncio.timeout(240):
        async for line in process.stderr:
            if b'"listening"' in line:
                return json.loads(line)["url"]
    raise AssertionError("it ended before it listened")
