"""The secret of a run's engines: the ASGI middleware inside vLLM that asks for it, and what callers send.

Weights can only be changed in vLLM's development mode, in which everybody who reaches the port may stall all calls, replace
the model, and run methods inside the workers: any user of the host, an agent with a shell included. So every request must
carry the secret, and two routes that nobody needs are closed to all:

    --middleware swarmq.engine.auth.Guard      with the secret in $SWARMQ_ENGINE_SECRET

Only the Python standard library is imported here at the top: callers need no vLLM, and vLLM needs nothing else of us.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

SECRET_ENV = "SWARMQ_ENGINE_SECRET"  # noqa: S105 - its name, in the environment of vLLM and of whoever calls it
MIDDLEWARE = f"{__name__}.Guard"
FACTS = "/swarmq/facts"
"""What the workers say of themselves (`worker_facts.py`), in place of vLLM's `/collective_rpc`, which runs any method of theirs."""
CLOSED = ("/collective_rpc", "/weight_checker")
"""The second one can zero the weights."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Pure ASGI middleware. Raises RuntimeError, which ends the server's start, where there is no secret to ask for."""

    def __init__(self, app: App) -> None:
        secret = os.environ.get(SECRET_ENV, "")
        if not secret:
            raise RuntimeError(f"${SECRET_ENV} is not set: `swarmq engine secret RUN` prints the run's")
        self._app, self._expected = app, _bearer(secret).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._knows(scope):
            await _refuse(scope, send, 401, f"this engine serves one run of swarmq: send its secret (${SECRET_ENV})")
        elif scope["path"].rstrip("/").endswith(CLOSED):
            await _refuse(scope, send, 403, f"{scope['path']} is closed here")
        elif scope["path"] == FACTS:
            workers = await scope["app"].state.engine_client.collective_rpc("swarmq_facts")
            await _answer(send, 200, {"results": workers})
        else:
            await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


def authorized(secret: str) -> Mapping[str, str]:
    """Headers for an engine that asks for `secret`; none without one."""
    return {"authorization": _bearer(secret)} if secret else {}


def _bearer(secret: str) -> str:
    return f"Bearer {secret}"


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    await _answer(send, status, {"error": {"message": reason, "code": status}})


async def _answer(send: Send, status: int, body: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
