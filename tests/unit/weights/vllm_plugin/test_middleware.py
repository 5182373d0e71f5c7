"""The middleware inside vLLM lets nothing through that does not carry the secret, whatever kind of connection it is."""

from __future__ import annotations

import json

import pytest

from swarmq.weights.format.conventions import WORKER_FACTS_ROUTE
from swarmq.weights.vllm_plugin.middleware import SecretMiddleware


class Served:
    """What the guard stands before."""

    def __init__(self):
        self.reached, self.sent = [], []
        self.state, self.engine_client = self, self

    async def __call__(self, scope, receive, send):
        self.reached.append(scope.get("path", scope["type"]))

    async def collective_rpc(self, method):
        return [{"method": method}]

    async def send(self, message):
        self.sent.append(message)


@pytest.fixture
def served():
    return Served()


@pytest.fixture
def ask(served, monkeypatch):
    monkeypatch.setenv("SWARMQ_ENGINE_SECRET", "s3")
    guard = SecretMiddleware(served)

    async def ask(path, *headers, kind="http"):
        await guard({"type": kind, "path": path, "headers": headers, "app": served}, None, served.send)
        return served.sent[0].get("status") if served.sent else None

    return ask


KNOWN = (b"authorization", b"Bearer s3")


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"s3"),),
        ((b"authorization", b"Bearer s3 "),),
        ((b"x", b"Bearer s3"),),
        ((b"authorization", b"Bearer no"), KNOWN),
    ],
)
async def test_who_does_not_know_the_secret_reaches_nothing(ask, served, headers):
    assert await ask("/health", *headers) == 401
    assert served.reached == []
    assert b"s3" not in served.sent[1]["body"]


async def test_a_request_with_the_secret_reaches_the_engine(ask, served):
    assert await ask("/health", KNOWN) is None
    assert served.reached == ["/health"]


async def test_a_websocket_of_a_stranger_is_closed(ask, served):
    await ask("/v1/realtime", kind="websocket")
    assert (served.reached, served.sent[0]["type"]) == ([], "websocket.close")


async def test_the_server_itself_starts_and_ends(ask, served):
    await ask("", kind="lifespan")
    assert served.reached == [""]


@pytest.mark.parametrize("path", ["/collective_rpc", "/collective_rpc/", "/root/collective_rpc", "/weight_checker"])
async def test_some_routes_are_closed_to_all(ask, served, path):
    assert await ask(path, KNOWN) == 403
    assert served.reached == []


async def test_workers_are_asked_for_their_facts_alone(ask, served):
    assert await ask(WORKER_FACTS_ROUTE, KNOWN) == 200
    assert json.loads(served.sent[1]["body"]) == {"results": [{"method": "swarmq_facts"}]}


def test_without_a_secret_no_server_starts(served, monkeypatch):
    monkeypatch.delenv("SWARMQ_ENGINE_SECRET", raising=False)
    with pytest.raises(RuntimeError, match="SWARMQ_ENGINE_SECRET is not set"):
        SecretMiddleware(served)
