"""A model behind HTTP that answers chat completions with what a test has written down, streamed or whole."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class ScriptedModel(http.server.ThreadingHTTPServer):
    """`script`: what to answer next: text, a tool call (`{"name": ..., "arguments": ...}`) or the status of an error."""

    request_queue_size = 128

    def __init__(self, script: list[Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = list(script)
        self.asked: list[dict[str, Any]] = []
        """Bodies of the requests, each with its `key` and `agent` from the headers."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def episode(self, payload: Any, **facts: Any) -> Any:
        """An episode's handle as far as an environment reads it."""
        ep = SimpleNamespace(
            base_url=self.url,
            api_key="key",
            model="main",
            ca=b"",
            mode="train",
            episode_id="e-1",
            payload=payload,
        )
        vars(ep).update(facts)
        ep.blocking = lambda: ep
        return ep


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ScriptedModel

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"].removeprefix("Bearer ")
        self.server.asked.append({**body, "key": key, "agent": self.headers["X-Swarmq-Agent"]})
        says = self.server.script.pop(0) if self.server.script else 500
        if isinstance(says, int):
            self.reply(says, "application/json", json.dumps({"error": {"message": f"scripted {says}"}}))
            return
        called = {"index": 0, "id": "call-1", "type": "function", "function": says}
        message = {"role": "assistant", "content": says} if isinstance(says, str) else {
            "role": "assistant", "content": None, "tool_calls": [called]
        }  # fmt: skip
        reason = "stop" if isinstance(says, str) else "tool_calls"
        base = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": reason, "message": message}
            answer = {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
            self.reply(200, "application/json", json.dumps(answer))
            return
        base["object"] = "chat.completion.chunk"
        events = [
            {**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
            {**base, "choices": [], "usage": usage},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.reply(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))

    def reply(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@contextlib.contextmanager
def scripted_model(*script: Any) -> Iterator[ScriptedModel]:
    with ScriptedModel(list(script)) as model:
        thread = threading.Thread(target=model.serve_forever)
        thread.start()
        try:
            yield model
        finally:
            model.shutdown()
            thread.join()
