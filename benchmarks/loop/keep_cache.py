"""ASGI middleware for vLLM that keeps cached keys and values over a pause, to measure what clearing them at every push costs.

Not for training: tokens are then sampled from keys of older weights, too, so that their log-probabilities belong to no version.
"""

from __future__ import annotations

from typing import Any


class KeepCache:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path") == "/pause":
            query = scope["query_string"].replace(b"clear_cache=true", b"clear_cache=false")
            scope = {**scope, "query_string": query}
        await self._app(scope, receive, send)
