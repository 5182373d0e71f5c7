"""Run in verifiers' interpreter: play scenarios, each against a scripted model of its own, and print what became of them as JSON."""

import asyncio
import json
import sys

from support.scripted_model import scripted_model
from swarmq.environments import load_environment


async def play(name, target, script):
    with scripted_model(*script) as model:
        try:
            environment = load_environment(target)
            async with environment.serving():
                [task] = [task for task in environment.tasks("train") if task["task"]["idx"] == 3]
                outcome = await environment.attempt(model.episode(task, episode_id=name))
        except Exception as error:
            return {"error": [type(error).__name__, str(error)], "asked": model.asked}
        kept = ("reward", "metrics", "metadata", "agent_rewards")
        return {**{field: getattr(outcome, field) for field in kept}, "asked": model.asked}


async def main():
    scenarios = json.loads(sys.stdin.read())
    played = await asyncio.gather(*(play(name, *scenario) for name, scenario in scenarios.items()))
    sys.stdout.write("\n" + json.dumps(dict(zip(scenarios, played, strict=True))))


asyncio.run(main())
