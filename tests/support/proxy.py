"""A proxy served in the test's own process and loop, over real HTTP on a free port."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession
from litestar import Litestar

from swarmq import keys
from swarmq.config import ProxySettings
from swarmq.proxy.main import KEEP_S, server_config
from swarmq.testing.app_server import serve_app

ROOT = b"r" * 32


@asynccontextmanager
async def served(
    app: Litestar,
    *,
    tls: Path | None = None,
    settings: ProxySettings | None = None,
    most_connections: int = 4096,
    keep_s: int = KEEP_S,
    port: int = 0,
) -> AsyncIterator[str]:
    """The url under which `app` answers; by https with the certificate in the folder `tls`."""
    settings = settings or ProxySettings()
    if tls:
        files = {"certificate": str(tls / "cert.pem"), "key": str(tls / "key.pem")}
        settings = msgspec.structs.replace(settings, **files)
    config = server_config(app, settings, most_connections=most_connections, keep_s=keep_s)
    config.timeout_graceful_shutdown = 2
    async with serve_app(config, port=port) as listening:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listening}"


class Agent:
    """Mints keys of a run and asks its proxy."""

    def __init__(self, url: str, run: str, http: ClientSession) -> None:
        self.url = url
        self.run = run
        self.http = http

    def key(
        self,
        episode: str = "e1",
        *,
        policies: tuple[str, ...] = ("main",),
        expires_in: float = 600,
        root: bytes = ROOT,
        **claims: Any,
    ) -> str:
        fields = {"run": self.run, "client": "c", **claims}
        made = keys.Claims(episode_id=episode, policies=policies, expires_at=time.time() + expires_in, **fields)
        return keys.mint(keys.derive_client_secret(root, made.client), made)

    async def post(
        self,
        body: Any,
        path: str = "/v1/chat/completions",
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> tuple[int, Any, bytes]:
        """Status, headers and body of an answer that is not streamed."""
        sent = {"authorization": f"Bearer {key or self.key()}", "content-type": "application/json", **(headers or {})}
        data = msgspec.json.encode(body) if raw is None else raw
        async with self.http.post(self.url + path, data=data, headers=sent) as response:
            return response.status, response.headers, await response.read()

    async def ask(
        self, *messages: Any, key: str | None = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> Any:
        """The parsed completion of a request that must be answered."""
        body = {"model": "main", "messages": list(messages), **fields}
        status, _, raw = await self.post(body, key=key, headers=headers)
        assert status == 200, raw
        return msgspec.json.decode(raw)

    async def refused(self, body: Any, **how: Any) -> tuple[int, Any]:
        """Status and `error` of a request that must not be answered."""
        status, _, raw = await self.post(body, **how)
        assert status != 200, raw
        error = msgspec.json.decode(raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error

    async def stream(self, *messages: Any, key: str | None = None, **fields: Any) -> list[Any]:
        """The parsed events of a streamed completion; the last is "[DONE]" where it ended well."""
        body = {"model": "main", "messages": list(messages), "stream": True, **fields}
        status, _, raw = await self.post(body, key=key)
        assert status == 200, raw
        return events(raw)


def token(*roles: str, name: str = "ops", expires_in: float = 86_400, run: str = "r", **how: Any) -> str:
    """Of an operator with these roles. Tests make some while they are collected and use them when their turn comes."""
    operator = keys.Operator(run=run, name=name, roles=roles, expires_at=time.time() + expires_in, **how)
    secret = keys.derive_client_secret(ROOT, name) if operator.by_client else keys.derive_operator_secret(ROOT, name)
    return keys.mint_operator(secret, operator)


def events(raw: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    return ["[DONE]" if line == b"[DONE]" else msgspec.json.decode(line) for line in lines]
