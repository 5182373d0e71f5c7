"""Callers of `benchmarks.proxy_h200`, as a process: `python -m benchmarks.proxy.callers SETTINGS`, JSON as in `Settings`.

What is called comes by standard input, as JSON in a line; the next line ends it, whatever is in flight then:

    {"urls": ["http://127.0.0.1:8000/v1"], "model": "main", "logprobs": false}     answered with `calling` when calls are under way
    null                                                                           answered with `stopped`
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

import aiohttp
import msgspec
import uvloop

from benchmarks.proxy.run import episode_key, streamed


class Settings(msgspec.Struct, frozen=True):
    """Of one process."""

    number: int
    streams: int
    tokens: int
    """Of an answer, on average."""
    prompt: int
    secret: bytes


class Target(msgspec.Struct, frozen=True):
    """What is called."""

    urls: list[str]
    model: str
    logprobs: bool
    key: str = ""
    """For callers of an engine; empty: the keys of episodes."""


class Callers:
    """Make one call after another, each on its stream."""

    def __init__(self, http: aiohttp.ClientSession, settings: Settings, target: Target) -> None:
        self._http, self._settings, self._target = http, settings, target
        self._dice = random.Random(settings.number)
        self._answers = asyncio.Semaphore(0)

    async def under_way(self) -> None:
        """Until there were half as many answers as there are streams: then calls are of every age."""
        for _ in range(max(self._settings.streams // 2, 1)):
            await self._answers.acquire()

    async def call_on(self, stream: int) -> None:
        low, high = self._settings.tokens // 2, 3 * self._settings.tokens // 2
        url = self._target.urls[(self._settings.number + stream) % len(self._target.urls)]
        await self._call(url, self._dice.randint(1, high))  # as if it had begun some time ago
        while True:
            await self._call(url, self._dice.randint(low, high))

    async def _call(self, url: str, tokens: int) -> None:
        body = {
            "model": self._target.model,
            "messages": [{"role": "user", "content": "one two three " * (self._settings.prompt // 8)}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": self._target.logprobs,
        }
        key = self._target.key or episode_key(self._settings.secret, mode="eval")
        async with contextlib.aclosing(streamed(self._http, url, key, body)) as blocks:
            async for _ in blocks:
                pass
        self._answers.release()


async def play(settings: Settings) -> None:
    limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=600)}
    async with aiohttp.ClientSession(**limits) as http:
        while line := await asyncio.to_thread(sys.stdin.readline):
            target = msgspec.json.decode(line, type=Target | None)
            if target is not None:
                line = await until_next_line(Callers(http, settings, target), settings.streams)
                assert msgspec.json.decode(line) is None
            print("stopped", flush=True)


async def until_next_line(callers: Callers, streams: int) -> str:
    """Call until there is one; raises what a caller raises."""
    next_line = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    calls = [asyncio.create_task(callers.call_on(stream)) for stream in range(streams)]
    under_way = asyncio.create_task(callers.under_way())
    under_way.add_done_callback(lambda _: print("calling", flush=True))
    done, _ = await asyncio.wait([next_line, *calls], return_when=asyncio.FIRST_COMPLETED)
    for task in (under_way, *calls):
        task.cancel()
    await asyncio.gather(under_way, *calls, return_exceptions=True)
    for task in done:
        task.result()
    return next_line.result()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play(msgspec.json.decode(sys.argv[1], type=Settings)))
