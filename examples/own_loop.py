"""A training loop of your own: begin and end episodes, evaluate. Use it where `run_episodes_until_all_complete` does not fit."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

from swarmq import AsyncEpisode, AsyncSwarmClient, Outcome, SwarmTask

SECRETS = [SwarmTask(f"guess-{number}", payload=number) for number in (3, 17, 42, 88)]
MAX_TURNS = 6


async def play(ep: AsyncEpisode) -> Outcome:
    """Play a game of several turns: the model guesses a number and is told "higher" or "lower"."""
    model = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    messages: list[Any] = [{"role": "user", "content": "Guess my number between 1 and 100. Say only the number."}]
    for turn in range(1, MAX_TURNS + 1):
        answer = await model.chat.completions.create(model=ep.model, messages=messages)
        text = answer.choices[0].message.content or ""
        guess = int(text) if text.strip().isdigit() else 0
        if guess == ep.payload:
            return Outcome(1.0 / turn, success=True, metrics={"turns": turn})
        hint = "higher" if guess < ep.payload else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return Outcome(0.0, success=False, metrics={"turns": MAX_TURNS})


async def main() -> None:
    async with AsyncSwarmClient() as client:
        for task in SECRETS:
            for _ in range(client.invite.group_size):  # the attempts at one task form a group
                async with client.episode(task) as ep:  # an exception in the block fails this episode only
                    outcome = await play(ep)
                    await ep.end(outcome.reward, success=outcome.success, metrics=outcome.metrics)
        print(await client.evaluate(SECRETS, play))  # evaluation episodes are never trained


if __name__ == "__main__":
    asyncio.run(main())
