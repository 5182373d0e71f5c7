"""A chat endpoint with scripted answers, for the agents of examples/: no broker, no proxy, no model."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

ToolCall = tuple[str, Any]
"""Name of a tool and its arguments: data, or a text to send as it is."""
Answer = str | ToolCall | Callable[[list[dict[str, Any]]], Any]
"""Text, a tool call, or a function that returns one of them for the messages so far."""


class ScriptedChat:
    """What the endpoint says next, and what it was sent."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self.answers = iter(answers)
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        said: Any = next(self.answers)
        if callable(said):
            said = said(request["messages"])
        if isinstance(said, str):
            return {"role": "assistant", "content": said}
        name, arguments = said
        function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        call = {"id": f"c{len(self.requests)}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def conversation(self) -> list[tuple[Any, ...]]:
        """Return what was said up to the last request, comparable with `spoken` of a demonstration."""
        return spoken(self.requests[-1]["messages"])

    def episode(self, payload: Any, **more: Any) -> Any:
        """Return an episode's handle, as far as agents use it."""
        return SimpleNamespace(base_url=self.url, api_key="key", model="main", payload=payload, **more)


def spoken(messages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return role, text and tool calls of each message; ids of calls are left out."""
    return [
        (
            message["role"],
            message.get("content") or "",
            *((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()),
        )
        for message in messages
    ]


def answers_of(demonstration: list[dict[str, Any]]) -> list[Answer]:
    """Return the assistant's part of a demonstration as a script."""
    script: list[Answer] = []
    for message in demonstration:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            script.append((calls[0]["name"], calls[0]["arguments"]) if calls else message["content"])
    return script


@contextlib.contextmanager
def scripted_chat(answers: Iterable[Answer]) -> Iterator[ScriptedChat]:
    chat = ScriptedChat(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = chat.answer(request)
            choice = {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
            }
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "c", "object": "chat.completion", "created": 0, "model": request["model"], "usage": usage}
            body = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        chat.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield chat
        finally:
            server.shutdown()
            thread.join()
