"""`swarmq engine start --join INVITE`: an engine that has nothing but an invite and its copy of the model."""

from __future__ import annotations

import asyncio
import signal
import ssl

import pytest
from aiohttp import ClientSession, TCPConnector

from support.engine import KNOWN
from support.tls import self_signed
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.hosts import read_hosts

pytestmark = [pytest.mark.vllm, pytest.mark.broker]


async def test_it_serves_the_run_behind_its_secret_until_it_is_told_to_leave(world, engine_url, tmp_path):
    tls = self_signed(tmp_path)
    world.environment["SSL_CERT_FILE"] = str(tls / "cert.pem")
    files = ("--certificate", str(tls / "cert.pem"), "--key", str(tls / "key.pem"))
    async with world.command("engine", "start", "--policy", "main", *files) as process:
        url = (await printed(process, " serves main"))[-1].split()[0]
        assert url.startswith("https://")
        registry = EngineRegistry(world.job)
        assert registry.urls() == {"main": (engine_url, url)}
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].engines == {url: "main"}
        assert await world.output("engine", "list", str(world.job.run_folder.path)) == [
            *(["main", one, "default", "serves"] for one in (engine_url, url))
        ]
        trusted = ssl.create_default_context(cafile=tls / "cert.pem")
        async with ClientSession(connector=TCPConnector(ssl=trusted)) as http:
            assert (await http.get(f"{url}/weight_info")).status == 401
            async with http.get(f"{url}/swarmq/facts", headers=KNOWN) as answer:
                [facts] = (await answer.json())["results"]
            assert (await http.get(f"https://127.0.0.1:{facts['receiver_port']}/")).status == 401
        process.send_signal(signal.SIGINT)
        await printed(process, "waiting for open ones")
        assert registry.urls() == {"main": (engine_url,)}
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].engines == {}
        async with asyncio.timeout(600):
            assert await process.wait() == 0
    assert list(world.folder.iterdir()) == []


async def printed(process, text) -> list[str]:
    """The lines up to the one with this text."""
    lines = []
    async with asyncio.timeout(600):
        async for line in process.stdout:
            lines.append(line.decode())
            if text in lines[-1]:
                return lines
    raise AssertionError(f"it ended without {text!r}: {lines} {(await process.stderr.read()).decode()}")
