"""A server that answers like vLLM, as a process: `python -m benchmarks.faults.engine PORT JOURNAL [--quick]`.

It speaks the endpoints that swarmq uses (render, generate, tokenize, and the control of pauses and weights), so the
real proxy and the real learner talk to it over HTTP; killing and starting it costs a tenth of a second, not half a
minute. One token is one ASCII character. Answers are random letters. Requests are kept over a pause, every token
knows the version that sampled it, and all versions are forgotten with the process, as vLLM's are. Every update of
weights goes into JOURNAL with a digest of the tensors, for the proof to compare with a replay.

At SIGUSR1 it does what vLLM's API server does when its EngineCore has died: connections break off, the port is closed, and the
process lives on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import signal
import string
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

END = 3
"""Id of the token that ends an answer."""
VOCABULARY = 128
MAX_MODEL_LEN = 512
TOKEN_S = 0.004
HEAD = "lm_head.weight"

Json = dict[str, Any]


class Engine:
    """The state that a vLLM server has: its weights' label, whether it is paused, whether an update is open."""

    def __init__(self, journal: Path, *, token_s: float) -> None:
        self._token_s = token_s
        self.label = "default"
        self.updating = False
        self.going = asyncio.Event()
        self.going.set()
        self._journal = journal.open("ab", buffering=0)
        self._digest = ""

    def note(self, event: str, **fields: Any) -> None:
        self._journal.write(json.dumps({"event": event, "at": time.time(), **fields}).encode() + b"\n")

    async def sample(self, max_tokens: int) -> AsyncIterator[tuple[int, str]]:
        """Token and the version that sampled it; waits while paused."""
        for left in range(min(max_tokens, random.randint(3, 14)), 0, -1):
            await asyncio.sleep(self._token_s)
            await self.going.wait()
            yield (END if left == 1 else ord(random.choice(string.ascii_lowercase))), self.label

    async def close(self, _: web.Application) -> None:
        self._journal.close()

    # ------------------------------------------------------------------------------------------- weights

    async def pause(self, _: web.Request) -> web.Response:
        self.going.clear()
        self.note("pause")
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.going.set()
        self.note("resume", label=self.label)
        return web.json_response({})

    async def relabel(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})

    async def start_update(self, _: web.Request) -> web.Response:
        if self.updating:
            return web.json_response({"error": {"message": "a weight update is already active"}}, status=400)
        self.updating = True
        self.note("start", label=self.label)
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        path = (await request.json())["update_info"]["path"]
        try:
            self._digest = digest(load_file(path))
        except OSError as error:
            return web.json_response({"error": {"message": f"{error}; the weights are untouched"}}, status=400)
        self.note("update", digest=self._digest)
        return web.json_response({})

    async def finish_update(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.updating = False
        if version := body.get("weight_version"):
            self.label = version
            self.note("finish", version=int(version), digest=self._digest)
        return web.json_response({})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.going.is_set()})

    # ------------------------------------------------------------------------------------------ sampling

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        limit = body["sampling_params"]["max_tokens"]
        if not body["stream"]:
            tokens = [token async for token in self.sample(limit)]
            return web.json_response({"choices": [_choice(tokens, tokens)]})
        with contextlib.suppress(ConnectionResetError):  # the proxy is gone
            return await self._streamed(request, limit)
        return web.Response()

    async def _streamed(self, request: web.Request, limit: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        tokens = []
        async for token in self.sample(limit):
            tokens.append(token)
            chunk = {"choices": [_choice([token], tokens, last=False)]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: " + json.dumps({"choices": [_choice([], tokens)]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def digest(tensors: dict[str, Any]) -> str:
    """Of all weights, bit for bit; a tied head is another name of the embedding."""
    found = hashlib.sha256()
    for name in sorted(tensors.keys() - {HEAD}):
        found.update(name.encode() + tensors[name].tobytes())
    return found.hexdigest()


def spell(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids if token != END)


def _choice(new: list[tuple[int, str]], whole: list[tuple[int, str]], *, last: bool = True) -> Json:
    ids = [token for token, _ in new]
    choice: Json = {
        "index": 0,
        "text": spell(ids),
        "token_ids": ids,
        "logprobs": {"content": [{"token": chr(token), "logprob": -4.85} for token in ids]},
    }
    if last:
        choice |= {
            "finish_reason": "stop" if whole and whole[-1][0] == END else "length",
            "weight_versions": _spans([version for _, version in whole]),
        }
    return choice


def _spans(versions: list[str]) -> list[Json]:
    spans: list[Json] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    return spans


async def _render(request: web.Request) -> web.Response:
    chat = await request.json()
    text = "".join(f"\x02{m['role']}\n{m.get('content') or ''}\x03\n" for m in chat["messages"]) + "\x02assistant\n"
    sampling = {key: chat[key] for key in ("temperature", "max_tokens") if key in chat}
    return web.json_response({"token_ids": _ids(text), "sampling_params": sampling})


async def _tokenize(request: web.Request) -> web.Response:
    return web.json_response({"tokens": _ids((await request.json())["prompt"])})


async def _detokenize(request: web.Request) -> web.Response:
    return web.json_response({"prompt": "".join(map(chr, (await request.json())["tokens"]))})


def _ids(text: str) -> list[int]:
    return [ord(character) % VOCABULARY for character in text]


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "scripted", "max_model_len": MAX_MODEL_LEN}]})


async def application(journal: Path, *, token_s: float) -> web.Application:
    engine, app = Engine(journal, token_s=token_s), web.Application()
    for path, answer in {"/health": _healthy, "/v1/models": _models}.items():
        app.router.add_get(path, answer)
    app.router.add_get("/weight_info", engine.info)
    app.router.add_get("/is_paused", engine.paused)
    for path, answer in {
        "/v1/chat/completions/render": _render,
        "/inference/v1/generate": engine.generate,
        "/tokenize": _tokenize,
        "/detokenize": _detokenize,
        "/pause": engine.pause,
        "/resume": engine.resume,
        "/wake_up": engine.resume,  # nothing sleeps here, and waking what is paused lets it go on
        "/update_weight_version": engine.relabel,
        "/start_weight_update": engine.start_update,
        "/update_weights": engine.update,
        "/finish_weight_update": engine.finish_update,
    }.items():
        app.router.add_post(path, answer)
    app.on_cleanup.append(engine.close)
    engine.note("started")
    return app


def main(port: str, journal: str, quick: str = "") -> None:
    """`--quick` takes no time for a token."""
    asyncio.run(serve(Path(journal), int(port), token_s=0.0 if quick else TOKEN_S))


async def serve(journal: Path, port: int, *, token_s: float) -> None:
    """Until SIGTERM or SIGINT."""
    runner = web.AppRunner(await application(journal, token_s=token_s), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site, stop = web.TCPSite(runner, "127.0.0.1", port), asyncio.Event()

    async def lose_core() -> None:
        await site.stop()
        assert runner.server
        for connection in runner.server.connections:
            if connection.transport:
                connection.transport.abort()

    loop, losing = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    loop.add_signal_handler(signal.SIGUSR1, lambda: losing.add(loop.create_task(lose_core())))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await site.start()
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    main(*sys.argv[1:])
