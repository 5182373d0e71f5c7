"""A scripted vLLM: the control endpoints and the state behind them as the real one was seen to behave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from swarmq.weights.format.conventions import UNTOUCHED


@dataclass
class ScriptedVllm:
    """`fail[path]` makes that endpoint refuse with this text."""

    url: str = ""
    secret: str = ""
    """What it asks every caller for."""
    version: str = "0.32.0"
    label: str = "default"
    paused: bool = False
    sleeping: set[str] = field(default_factory=set)
    """Of its memory."""
    killed_in: int | None = None
    """The learner is killed in its call of this number that changes something: the call has its effect, later ones never come."""
    changes: int = 0
    """Such calls so far."""
    active: bool = False
    weights: str = "on disk"
    workers: list[dict[str, object]] | None = None
    """What they say of themselves; None without our extension."""
    metrics: str = ""
    tokens: list[int] = field(default_factory=lambda: [5, 6, 7])
    """Of any text."""
    fail: dict[str, str] = field(default_factory=dict)
    fail_updates_with: dict[str, str] = field(default_factory=dict)
    """A key of the update's info -> the refusal."""
    missing: set[str] = field(default_factory=set)
    """Routes that it does not have."""
    drop: set[str] = field(default_factory=set)
    foreign: str = ""
    """What it answers to everything, as something that is no vLLM."""
    late: set[str] = field(default_factory=set)
    """Routes that answer after everybody has gone."""
    silent: bool = False
    going: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when calls that were not answered may end."""
    calls: list[str] = field(default_factory=list)
    cleared: list[bool] = field(default_factory=list)
    """Whether each pause cleared the cache."""
    updates: list[dict[str, object]] = field(default_factory=list)
    met: list[dict[str, object]] = field(default_factory=list)
    seen_while_serving: set[tuple[str, str]] = field(default_factory=set)

    @property
    def asleep(self) -> bool:
        return bool(self.sleeping)

    def note_what_is_served(self) -> None:
        """Keep label and weights with which an agent would be answered now."""
        if not self.paused:
            self.seen_while_serving.add((self.label, "gone" if self.asleep else self.weights))

    def is_of_the_dead(self, request: web.Request) -> bool:
        if self.killed_in is not None and request.method == "POST":
            self.changes += 1
        return self.killed_in is not None and self.changes > self.killed_in

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if self.secret and request.headers.get("authorization") != f"Bearer {self.secret}":
            return web.json_response({"error": {"message": "send its secret", "code": 401}}, status=401)
        self.calls.append(path)
        if self.silent or path in self.late:
            await self.going.wait()
        if self.foreign:
            return web.Response(text=self.foreign)
        body = await request.json() if request.can_read_body else {}
        if path in self.drop or self.is_of_the_dead(request):
            assert request.transport
            request.transport.close()
            return web.Response()
        if path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        if path in self.fail:
            self.active = self.active and path != "/update_weights"
            return self.refuse(self.fail[path])
        match path:
            case "/health":
                return web.Response()
            case "/tokenize":
                return web.json_response({"tokens": self.tokens})
            case "/version":
                return web.json_response({"version": self.version})
            case "/metrics":
                return web.Response(text=self.metrics)
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/is_paused":
                return web.json_response({"is_paused": self.paused})
            case "/pause":
                assert request.query["mode"] == "keep"
                self.cleared.append(request.query["clear_cache"] == "true")
                self.paused = True
            case "/resume":
                self.paused = False
            case "/sleep":
                assert request.query == {"level": "1", "mode": "keep"}
                self.paused, self.sleeping = True, {"weights", "kv_cache"}
            case "/wake_up":
                self.sleeping -= set(request.query.getall("tags", self.sleeping))
                self.paused = self.asleep
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/start_weight_update":
                if self.active:
                    return self.refuse("start_weight_update called while a weight update is already active.")
                self.active = True
            case "/update_weights":
                if not self.active:
                    return self.refuse("start_weight_update must be called before update_weights.")
                assert self.paused
                assert "weights" not in self.sleeping, "vLLM crashes then"
                if refusal := next(
                    (text for key, text in self.fail_updates_with.items() if key in body["update_info"]), ""
                ):
                    self.active = False
                    return self.refuse(refusal)
                self.updates.append(body["update_info"])
                self.weights = body["update_info"].get("path", "packed")
                if self.changes == self.killed_in:
                    self.weights = "torn"
            case "/swarmq/facts":
                if self.workers is None:
                    return web.json_response({"detail": "Not Found"}, status=404)
                return web.json_response({"results": self.workers})
            case "/init_weight_transfer_engine":
                self.met.append(body["init_info"])
            case "/finish_weight_update":
                if not self.active:
                    return self.refuse("finish_weight_update called without a matching start_weight_update.")
                self.active = False
                self.label = (body or {}).get("weight_version") or self.label
        self.note_what_is_served()
        return web.json_response({"message": "done"})

    def refuse(self, text: str) -> web.Response:
        return web.json_response({"error": {"message": text, "code": 500}}, status=500)

    def untouched(self) -> str:
        return f"Call to collective_rpc method failed: no such file, {UNTOUCHED}"


@pytest.fixture
async def vllm() -> AsyncIterator[ScriptedVllm]:
    async with serving(ScriptedVllm()) as scripted:
        yield scripted


@pytest.fixture
async def another() -> AsyncIterator[ScriptedVllm]:
    async with serving(ScriptedVllm()) as scripted:
        yield scripted


@asynccontextmanager
async def serving(scripted: ScriptedVllm) -> AsyncIterator[ScriptedVllm]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", scripted.handle)
    async with TestServer(app) as server:
        scripted.url = str(server.make_url("")).rstrip("/")
        try:
            yield scripted
        finally:
            scripted.going.set()
