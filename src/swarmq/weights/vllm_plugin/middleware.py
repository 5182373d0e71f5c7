"""Runs inside vLLM: ASGI middleware that requires the run's secret from every caller.

Weights can only be changed in vLLM's development mode, in which everybody who reaches the port, including any user of the host
and an agent with a shell, may block requests, replace the model, and call methods of the workers. So every request must carry
the secret, and two unused routes are closed to all callers:

    --middleware swarmq.weights.vllm_plugin.middleware.SecretMiddleware      with the secret in $SWARMQ_ENGINE_SECRET
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from swarmq.engine.auth import SECRET_ENV, carries_secret
from swarmq.weights.format.conventions import WORKER_FACTS_ROUTE

CLOSED_ROUTES = ("/collective_rpc", "/weight_checker")
"""`/collective_rpc` calls any method of the workers (`WORKER_FACTS_ROUTE` replaces it); `/weight_checker` can zero the weights."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class SecretMiddleware:
    """ASGI middleware. Raises RuntimeError, which stops the server's start, if no secret is set."""

    def __init__(self, app: App) -> None:
        secret = os.environ.get(SECRET_ENV, "")
        if not secret:
            raise RuntimeError(f"${SECRET_ENV} is not set: set it to what `swarmq engine secret RUN` prints")
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._is_authenticated(scope):
            await _refuse(scope, send, 401, f"this engine serves one run of swarmq: send its secret (${SECRET_ENV})")
        elif scope["path"].rstrip("/").endswith(CLOSED_ROUTES):
            await _refuse(scope, send, 403, f"{scope['path']} is closed here")
        elif scope["path"] == WORKER_FACTS_ROUTE:
            workers = await scope["app"].state.engine_client.collective_rpc("swarmq_facts")
            await _respond(send, 200, {"results": workers})
        else:
            await self._app(scope, receive, send)

    def _is_authenticated(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return carries_secret(given, self._secret)


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    await _respond(send, status, {"error": {"message": reason, "code": status}})


async def _respond(send: Send, status: int, body: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
