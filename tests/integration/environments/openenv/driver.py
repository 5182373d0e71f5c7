"""Run in openenv's interpreter: serve the game, play scenarios, each against a scripted model of its own, and print what became of
them as JSON."""

import asyncio
import contextlib
import json
import socket
import sys

import uvicorn
from game import Game, Guess, Hint
from openenv.core import create_fastapi_app

from support.scripted_model import scripted_model
from swarmq.environments import load_environment


@contextlib.asynccontextmanager
async def served():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=100)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


async def play(target, script):
    with scripted_model(*script) as model:
        try:
            environment = load_environment(target)
            async with environment.serving():
                [task] = environment.tasks("train")
                outcome = await environment.attempt(model.episode(task))
        except Exception as error:
            return {"error": [type(error).__name__, str(error)], "asked": model.asked}
        return {"reward": outcome.reward, "metrics": outcome.metrics, "asked": model.asked}


async def main():
    scenarios = json.loads(sys.stdin.read())
    async with served() as url:
        played = await asyncio.gather(*(play(target.format(url=url), script) for target, script in scenarios.values()))
    sys.stdout.write("\n" + json.dumps(dict(zip(scenarios, played, strict=True))))


asyncio.run(main())
