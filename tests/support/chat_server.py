"""A chat completions endpoint that answers by a function of the conversation."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator


class ChatServer(http.server.ThreadingHTTPServer):
    def __init__(self, answer: Callable[[str], str | int], usage: dict[str, int] | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.usage = answer, usage
        """Last message -> text of the answer, or an HTTP status."""
        self.asked: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        answer = self.server.answer(body["messages"][-1]["content"])
        status = answer if isinstance(answer, int) else 200
        reply = {"error": {"message": "down"}}
        if status == 200:
            reply = {"choices": [{"message": {"content": answer}}], "usage": self.server.usage}
        raw = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve_chat(answer: Callable[[str], str | int], *, usage: dict[str, int] | None = None) -> Iterator[ChatServer]:
    """Serve in a thread. `usage`: tokens of each answer, as the endpoint counts them."""
    with ChatServer(answer, usage) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
