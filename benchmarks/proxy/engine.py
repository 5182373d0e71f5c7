"""A server that streams like vLLM and costs next to nothing, as a process: `python -m benchmarks.proxy.engine PORT`.

Answers `tokens` tokens, one every `interval_s`, both set by `POST /pace`: as OpenAI's chat completions for whoever asks
directly, and as vLLM's render and generate for swarmq's proxy. Every chunk is encoded beforehand.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import uvloop
from aiohttp import web

Json = dict[str, Any]

WORD, TOKEN, END = "word ", 7, 3
PROMPT = list(range(64))
ENTRY = {"token": WORD, "logprob": -0.5, "bytes": None, "top_logprobs": []}


class Engine:
    def __init__(self) -> None:
        self.tokens, self.interval_s = 16, 0.0

    async def pace(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokens, self.interval_s = body["tokens"], body["interval_s"]
        return web.json_response({})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("stream"):
            return await self.stream(request, ((1, chunk) for chunk in _chat_chunks(self.tokens)))
        await asyncio.sleep(self.interval_s * self.tokens)
        message = {"role": "assistant", "content": WORD * self.tokens}
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": self.tokens, "total_tokens": 0}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({**_head("chat.completion"), "choices": [choice], "usage": usage})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["stream"]:
            together = int(body["sampling_params"].get("stream_interval", 1))
            return await self.stream(request, _generate_chunks(self.tokens, together))
        await asyncio.sleep(self.interval_s * self.tokens)
        return web.json_response({"choices": [_gain(self.tokens, self.tokens)]})

    async def stream(self, request: web.Request, chunks: Iterator[tuple[int, bytes]]) -> web.StreamResponse:
        """Answer with chunks, each after the time of its tokens. `chunks`: number of tokens and bytes of each."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            for num_tokens, chunk in chunks:
                if self.interval_s:
                    await asyncio.sleep(self.interval_s * num_tokens)
                await response.write(chunk)
        return response


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _head(kind: str) -> Json:
    return {"id": "chatcmpl-0", "object": kind, "created": 0, "model": "scripted"}


def _delta(delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({**_head("chat.completion.chunk"), "choices": [choice]})


FIRST, MORE = _delta({"role": "assistant", "content": WORD}), _delta({"content": WORD})
LAST = _delta({}, "stop") + b"data: [DONE]\n\n"


def _chat_chunks(tokens: int) -> Iterator[bytes]:
    yield FIRST
    yield from (MORE for _ in range(tokens - 2))
    yield MORE + LAST


def _gain(count: int, total: int | None = None) -> Json:
    gain: Json = {
        "index": 0,
        "text": WORD * count,
        "token_ids": [TOKEN] * count,
        "logprobs": {"content": [ENTRY] * count},
    }
    if total is not None:
        gain |= {"finish_reason": "stop", "stop_reason": None}
        gain["weight_versions"] = [{"version": "default", "start": 0, "end": total}]
    return gain


@functools.cache
def _token_chunk(count: int) -> bytes:
    return _event({"choices": [_gain(count)]})


def _generate_chunks(tokens: int, together: int) -> Iterator[tuple[int, bytes]]:
    """The first token, then so many together, then the rest at once, as vLLM streams with `stream_interval`."""
    yield 1, _token_chunk(1)
    whole, rest = divmod(tokens - 2, together)
    yield from ((together, _token_chunk(together)) for _ in range(whole))
    yield rest + 1, _event({"choices": [_gain(rest + 1, tokens)]}) + b"data: [DONE]\n\n"


def main(port: str) -> None:
    async def fixed(answer: Json) -> Any:
        async def handler(_: web.Request) -> web.Response:
            return web.json_response(answer)

        return handler

    async def application() -> web.Application:
        engine, app = Engine(), web.Application()
        app.router.add_get("/health", await fixed({}))
        app.router.add_get("/weight_info", await fixed({"weight_version": "default"}))
        app.router.add_get("/v1/models", await fixed({"data": [{"id": "scripted", "max_model_len": 100_000}]}))
        app.router.add_post("/v1/chat/completions/render", await fixed({"token_ids": PROMPT, "sampling_params": {}}))
        app.router.add_post("/v1/chat/completions", engine.chat)
        app.router.add_post("/inference/v1/generate", engine.generate)
        app.router.add_post("/pace", engine.pace)
        return app

    quiet = {"print": None, "access_log": None, "shutdown_timeout": 1.0, "backlog": 4096}
    web.run_app(application(), host="127.0.0.1", port=int(port), loop=uvloop.new_event_loop(), **quiet)


if __name__ == "__main__":
    main(*sys.argv[1:])
