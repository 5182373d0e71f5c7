"""A laptop that steers a run of another host and attempts its episodes, with nothing but the host's address and a token.

    laptop.py HOST MODEL FOLDER

Prints a line for each thing that it has seen. In the middle it makes the file `FOLDER/ready` and waits for `FOLDER/go`; the daemon is
killed meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import swarmq
from swarmq import RemoteRun, SwarmClient, SwarmJob, launch
from swarmq.config import GroupSettings, Policy, SamplingDefaults, Train
from swarmq.errors import HostError

RATE = "policies.main.train.learning_rate"
STEPS = "policies.main.train.max_steps"


def main(host: str, model: str, folder: Path) -> None:
    train = Train(checkpoint_every=1, warmup_steps=0)
    policy = Policy(model=model, sampling=SamplingDefaults(max_tokens=4), train=train)
    job = SwarmJob(run="math", policies={"main": policy}, groups=GroupSettings(group_size=2, groups_per_batch=2))
    say("refused", param=refusal(SwarmJob(run="math", policies={"main": Policy(model="/nowhere/model")}), host))

    run = launch(job, host=host, request_id="first")
    again = launch(job, host=host, request_id="first")
    say("launched", same=again.name == run.name, taken=refusal(job, host), runs=len(run.host.runs()))
    run.wait("up")
    with SwarmClient(run.invite(), spool=folder / "spool") as client:
        worker = Worker(client)
        watch(run, steps=1)
        say("changed", set=run.set({RATE: 2e-6}), paused=run.pause(), resumed=run.resume().pace)
        started_at = run.status().started_at
        (folder / "ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.1)
        steps = run.status().policies["main"].step
        watch(run, steps=steps + 1)
        say("found", same_process=run.status().started_at == started_at)
        run.stop()
        view = run.wait("stopped")
        say("stopped", step=view.policies["main"].step)
        copies = run.download("main/checkpoints", folder / "copy")
        say("downloaded", files=sorted({path.name for path in copies}))
        run.resume({STEPS: view.policies["main"].step + 1})
        run.wait("up")
        done = run.wait("done")
        worker.stop()
    say("done", step=done.policies["main"].step, more=view.policies["main"].step + 1)
    say("logs", ended=any("stopped. `swarmq up" in line for line in run.logs()))


def refusal(job: SwarmJob, host: str) -> str | None:
    try:
        launch(job, host=host)
    except HostError as error:
        return error.param
    return "nothing"


def watch(run: RemoteRun, *, steps: int) -> None:
    while run.board().get("policies", {}).get("main", {}).get("step", 0) < steps:
        time.sleep(0.5)


class Worker:
    """Attempts episodes until it is stopped, also while the run is away."""

    def __init__(self, client: SwarmClient) -> None:
        self._client, self._stop = client, threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _work(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            tasks = [{"id": f"task-{number}-{part}"} for part in range(4)]
            self._client.run_episodes_until_all_complete(tasks, attempt, progress=False)


def attempt(ep: swarmq.Episode) -> float:
    from openai import OpenAI

    with OpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=8) as client:
        client.chat.completions.create(model=ep.model, messages=[{"role": "user", "content": "6 * 7?"}])
    return random.random()


def say(what: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    os._exit(0)  # the worker waits for a run that is over
