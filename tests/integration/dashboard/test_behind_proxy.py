"""The dashboard under /dashboard of a proxy: its process, who may read, who may act, and what its end ends."""

import asyncio
import contextlib

import msgspec
import pytest
from aiohttp import ClientSession, ClientTimeout

from support.proxy import ROOT, served, token
from support.stored import unpack_run
from swarmq.dashboard.access import HEADERS
from swarmq.dashboard.behind_proxy import open_pages
from swarmq.proxy.http.app import create_app
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

CONFIRM = {"x-swarmq-confirm": "yes"}


class Visit:
    def __init__(self, url, http, mount):
        self.url, self.http, self.mount = url, http, mount

    async def get(self, path, *roles, **headers):
        if roles:
            headers["authorization"] = f"Bearer {token(*roles, run='faults')}"
        async with self.http.get(self.url + path, headers=headers, allow_redirects=False) as answer:
            return answer.status, answer.headers, await answer.read()


@contextlib.asynccontextmanager
async def proxied(tmp_path, **how):
    job, folder = unpack_run(tmp_path)
    folder.root_secret.write_bytes(ROOT)
    job = msgspec.structs.replace(job, folder=str(tmp_path))
    engines = {name: [ScriptedEngine()] for name in job.policies}
    async with open_pages(job, **how) as mount:
        app = create_app(job, root=ROOT, engines=engines, broker=MemoryBroker(), pages=mount.handlers)
        async with served(app) as url, ClientSession(timeout=ClientTimeout(total=60)) as http:
            yield Visit(url, http, mount)


async def test_a_token_reads_with_the_role_read_and_acts_with_operate_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with proxied(tmp_path) as visit:
        status, headers, _ = await visit.get("/dashboard")
        assert (status, headers["location"]) == (307, "dashboard/")
        status, headers, body = await visit.get("/dashboard/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert {name: headers.get(name) for name in HEADERS} == HEADERS
        assert b"app.js" in body
        assert (await visit.get("/dashboard/app.js"))[0] == 200
        assert (await visit.get("/dashboard/api/runs"))[0] == 401
        assert (await visit.get("/dashboard/api/runs", "rollout"))[0] == 403
        status, _, body = await visit.get("/dashboard/api/runs", "read")
        assert status == 200
        assert [one["id"] for one in msgspec.json.decode(body)["runs"]] == ["faults"]
        assert (await visit.get("/dashboard/api/runs/faults/logs/..%2Fsecret", "read"))[0] == 404
        me = msgspec.json.decode((await visit.get("/dashboard/api/me", "operate"))[2])
        assert (me["base"], me["can_operate"]) == ("/dashboard", True)
        login = {"token": token("read", run="faults")}
        async with visit.http.post(f"{visit.url}/dashboard/api/login", json=login) as answer:
            cookie = answer.headers["set-cookie"].lower()
        assert "path=/dashboard/" in cookie
        for role, status in (("read", 403), ("operate", 400)):  # 400: the stored run is a copy, no process of it is up
            sent = {"authorization": f"Bearer {token(role, run='faults')}", **CONFIRM}
            url = f"{visit.url}/dashboard/api/runs/faults/actions"
            async with visit.http.post(
                url, json={"action": "format" if status == 400 else "pause"}, headers=sent
            ) as answer:
                assert answer.status == status, await answer.text()
        assert (await visit.get("/dashboard/nothing/here", "read"))[0] == 404
        assert (await visit.get("/metrics", "read"))[0] == 200


async def test_the_process_starts_with_the_first_request_comes_back_and_ends_with_the_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with proxied(tmp_path) as visit:
        await visit.get("/health")
        assert visit.mount._process is None
        await asyncio.gather(*(visit.get("/dashboard/") for _ in range(5)))
        first = visit.mount._process
        first.kill()
        await first.wait()
        assert (await visit.get("/dashboard/"))[0] == 200
        second = visit.mount._process
        assert second.pid != first.pid
    assert second.returncode is not None


async def test_streams_end_when_the_proxy_drains(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with proxied(tmp_path) as visit:
        sent = {"authorization": f"Bearer {token('read', run='faults')}"}
        async with visit.http.get(f"{visit.url}/dashboard/api/runs/faults/stream", headers=sent) as answer:
            assert await answer.content.readline() == b": connected\n"
            visit.mount.finish()
            async with asyncio.timeout(5):
                with contextlib.suppress(Exception):  # cut off
                    while await answer.content.readline():
                        pass


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/api/me"])
async def test_missing_packages_are_named(tmp_path, path):
    async with proxied(tmp_path, installed=lambda name: None if name == "numpy" else object()) as visit:
        status, _, body = await visit.get(path)
    assert (status, body.decode()) == (
        503,
        "not installed: numpy; pip install 'swarmq[dashboard]' where the proxy runs\n",
    )
