"""The agents of the loop benchmark: a few model calls, something new to read between them, a reward that varies.

python -m benchmarks.loop.agent CONCURRENCY TURNS WORDS     one worker process, invited by $SWARMQ_INVITE
"""

from __future__ import annotations

import random
import sys

import aiohttp
import msgspec

from swarmq import AsyncEpisode, AsyncSwarmClient
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker_processes import run_workers

CALL_S = 300.0


class Agent:
    """A chat in which every answer is followed by an observation. Nothing is judged: random weights say nothing."""

    def __init__(self, turns: int, words: int) -> None:
        self._turns, self._words = turns, words
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, ep: AsyncEpisode) -> float:
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

    async def _ask(self, ep: AsyncEpisode, messages: list[dict[str, str]]) -> str:
        assert self._http is not None
        headers = {"authorization": f"Bearer {ep.api_key}"}
        body = {"model": ep.model, "messages": messages}
        async with self._http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers) as response:
            answer = msgspec.json.decode(await response.read())
        if "choices" not in answer:
            raise RuntimeError(str(answer))
        return answer["choices"][0]["message"]["content"] or ""

    def _observation(self, dice: random.Random) -> str:
        return " ".join(dice.choice(("sum", "of", "is", "one", "two", "three", "four")) for _ in range(self._words))


def main() -> None:
    concurrency, turns, words = map(int, sys.argv[1:])
    plan = RunnerOptions(concurrency=concurrency, max_attempts=1000, progress=False)
    run_workers(AsyncSwarmClient(), {None: Agent(turns, words).__call__}, plan)


if __name__ == "__main__":
    main()
