"""`swarmq engine start --join INVITE`: an engine that has nothing but an invite and its copy of the model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm.entrypoints
from aiohttp import ClientSession, TCPConnector
from benchmarks.hosts.link import Link

from support.engine import KNOWN
from support.tls import self_signed
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.hosts import read_hosts

pytestmark = [pytest.mark.vllm, pytest.mark.broker]


ROUTE = re.compile(r'@\w+\.(?:get|post|put|delete|websocket)\(\s*"(/[^"]*)"')
STRANGER = """
import http.client, json, ssl, sys
host, port, routes = json.loads(sys.argv[1])
trusted = ssl.create_default_context(cafile=sys.argv[2])
websocket = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "c3dhcm1xIHRlc3RzISEhIQ=="}
for more in ({}, {"authorization": "Bearer wrong"}):
    for method, path, headers in [*((m, p, {}) for p in routes for m in ("GET", "POST")), ("GET", "/v1/realtime", websocket)]:
        connection = http.client.HTTPSConnection(host, port, timeout=120, context=trusted)
        connection.request(method, path, b"{}" if method == "POST" else None, {**headers, **more})
        answer = connection.getresponse()
        print(json.dumps([answer.status, method, path, answer.read().decode()]))
        connection.close()
"""


@pytest.fixture
def other_host() -> Iterator[tuple[str, list[str]]]:
    """An address of this host, and the words that run a command on another host; without root the other host is this one."""
    if os.geteuid():
        yield "127.0.0.1", []
        return
    with Link(gbit_per_s=1, round_trip_s=0.001) as link:
        device, (own, other) = link.hosts[0], link.addresses
        link.run(device, ["ip", "link", "set", device, "netns", "1"])
        subprocess.run(["ip", "address", "add", own, "peer", other, "dev", device], check=True)
        subprocess.run(["ip", "link", "set", device, "up"], check=True)
        yield own, link.command(link.hosts[1], [])


async def test_it_serves_the_run_behind_its_secret_until_it_is_told_to_leave(world, engine_url, tmp_path, other_host):
    address, elsewhere = other_host
    tls = self_signed(tmp_path, address)
    world.environment["SSL_CERT_FILE"] = str(tls / "cert.pem")
    place = ("--host", address, "--certificate", str(tls / "cert.pem"), "--key", str(tls / "key.pem"))
    async with world.command("engine", "start", "--policy", "main", *place) as process:
        url = (await printed(process, " serves main"))[-1].split()[0]
        assert url.startswith("https://")
        registry = EngineRegistry(world.job)
        assert registry.urls() == {"main": (engine_url, url)}
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].engines == {url: "main"}
        listed = await world.output("engine", "list", str(world.job.run_folder.path))
        # other tests may have pushed weights to the engine that was there
        assert listed == [["main", engine_url, listed[0][2], "serves"], ["main", url, "default", "serves"]]
        trusted = ssl.create_default_context(cafile=tls / "cert.pem")
        async with ClientSession(connector=TCPConnector(ssl=trusted)) as http:
            async with http.get(f"{url}/openapi.json", headers=KNOWN) as answer:
                routes = {*(await answer.json())["paths"], *find_routes()}
            async with http.get(f"{url}/swarmq/facts", headers=KNOWN) as answer:
                [facts] = (await answer.json())["results"]
        assert {"/collective_rpc", "/update_weights", "/pause", "/v1/chat/completions", "/swarmq/facts"} <= routes
        port = int(url.rpartition(":")[2])
        for listening, paths in ((port, routes), (facts["receiver_port"], {"/", "/weights", "/weights/a/0"})):
            for status, *what in await ask_as_stranger(elsewhere, address, listening, paths, tls / "cert.pem"):
                assert status in (401, 403), what
                assert status == 401 or what[:2] == ["GET", "/v1/realtime"], what  # uvicorn's answer to a websocket
        process.send_signal(signal.SIGINT)
        await printed(process, "waiting for open ones")
        assert registry.urls() == {"main": (engine_url,)}
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].engines == {}
        async with asyncio.timeout(600):
            assert await process.wait() == 0
    assert list(world.folder.iterdir()) == []


def find_routes() -> set[str]:
    """All routes in vLLM's source, whether this server has them or not, and swarmq's own."""
    sources = Path(vllm.entrypoints.__path__[0]).rglob("*.py")
    return {"/metrics", "/openapi.json", "/swarmq/facts"}.union(*(ROUTE.findall(path.read_text()) for path in sources))


async def ask_as_stranger(elsewhere, address, port, routes, certificate) -> list[list]:
    """Status, method, path and text of each answer that another host gets without a secret and with a wrong one."""
    target = json.dumps([address, port, sorted(routes)])
    argv = [*elsewhere, sys.executable, "-I", "-c", STRANGER, target, str(certificate)]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    assert process.returncode == 0
    answers = [json.loads(line) for line in told.decode().splitlines()]
    assert len(answers) == 2 * (2 * len(routes) + 1)
    return answers


async def printed(process, text) -> list[str]:
    """The lines up to the one with this text."""
    lines = []
    async with asyncio.timeout(600):
        async for line in process.stdout:
            lines.append(line.decode())
            if text in lines[-1]:
                return lines
    raise AssertionError(f"it ended without {text!r}: {lines} {(await process.stderr.read()).decode()}")
