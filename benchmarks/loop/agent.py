"""The agents of the loop benchmark: a few model calls, something new to read between them, a reward that varies.

python -m benchmarks.loop.agent CONCURRENCY TURNS WORDS     one worker process, invited by $SWARMQ_INVITE; with $LOOP_SERVER,
                                                            the same calls to vLLM itself, for nothing
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from typing import Any

import aiohttp
import msgspec

from swarmq import AsyncEpisode, AsyncSwarmClient, SwarmTask
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker_processes import run_workers

CALL_S = 300.0
SERVER_ENV = "LOOP_SERVER"
"""Environment variable with a `Server` as JSON; it holds the engine's secret."""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM server that is asked directly, as an agent sees an episode."""

    base_url: str
    api_key: str
    model: str
    sampling: dict[str, Any]
    """Sampling settings that the proxy would add to a call."""
    task: SwarmTask = SwarmTask("direct", "default", None)


class Agent:
    """A chat in which every answer is followed by an observation. Nothing is judged: random weights say nothing."""

    def __init__(self, turns: int, words: int) -> None:
        self._turns, self._words = turns, words
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, ep: AsyncEpisode | Server) -> float:
        if self._http is None:
            limits = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S), connector=limits)
        dice = random.Random()
        messages = [{"role": "user", "content": self._observation(random.Random(ep.task.id))}]
        for _ in range(self._turns):
            answer = await self._ask(ep, messages)
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": self._observation(dice)})
        return dice.random()

    async def _ask(self, ep: AsyncEpisode | Server, messages: list[dict[str, str]]) -> str:
        assert self._http is not None
        headers = {"authorization": f"Bearer {ep.api_key}"}
        body = {"model": ep.model, "messages": messages} | (ep.sampling if isinstance(ep, Server) else {})
        async with self._http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers) as response:
            answer = msgspec.json.decode(await response.read())
        if "choices" not in answer:
            raise RuntimeError(str(answer))
        return answer["choices"][0]["message"]["content"] or ""

    def _observation(self, dice: random.Random) -> str:
        return " ".join(dice.choice(("sum", "of", "is", "one", "two", "three", "four")) for _ in range(self._words))


async def ask_directly(concurrency: int, agent: Agent, server: Server) -> None:
    """Hold one conversation after another until killed. The conversations of a group of 8 begin alike, as in a run."""

    async def converse(lane: int) -> None:
        for number in itertools.count():
            task = SwarmTask(f"{os.getpid()}.{lane // 8}.{number}", "default", None)
            await agent(msgspec.structs.replace(server, task=task))

    async with asyncio.TaskGroup() as lanes:
        for lane in range(concurrency):
            lanes.create_task(converse(lane))


def main() -> None:
    concurrency, turns, words = map(int, sys.argv[1:])
    if server := os.environ.get(SERVER_ENV):
        asyncio.run(ask_directly(concurrency, Agent(turns, words), msgspec.json.decode(server, type=Server)))
    plan = RunnerOptions(concurrency=concurrency, max_attempts=1000, progress=False)
    run_workers(AsyncSwarmClient(), {None: Agent(turns, words).__call__}, plan)


if __name__ == "__main__":
    main()
