"""A laptop that trains on another host, with nothing but the host's address and a token.

    laptop.py HOST MODEL FOLDER

Prints a JSON object for each thing that it has seen. Once agents are at work it makes the file `FOLDER/ready`, and they stay at work until there is
`FOLDER/go`; the daemon is killed meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from support.toy_task import Toy, toy_settings
from swarmq import HostClient, SwarmClient, SwarmJob, SwarmTask, launch
from swarmq.config import Policy
from swarmq.errors import HostError

RATE, STEPS = "policies.main.train.learning_rate", "policies.main.train.max_steps"


def main(address: str, model: str, folder: Path) -> None:
    host = HostClient(address, patience_s=300.0)
    toy, job = Toy(), SwarmJob.build(toy_settings(model))
    say("refused", param=refusal(SwarmJob(run="toy", policies={"main": Policy(model="/nowhere/model")}), host))
    run = launch(job, host=host, request_id="first")
    again = launch(job, host=host, request_id="first")
    say("launched", same=again.name == run.name, taken=refusal(job, host), runs=len(host.runs()))
    before = run.wait("up")
    tasks = [SwarmTask(f"task-{number}", payload={"n": number}) for number in range(3)]
    say("fed", slots=[run.feed(tasks, source="laptop", repeats=2).fed for _ in range(2)])
    with SwarmClient(run.invite("laptop"), spool=folder / "spool") as client:
        toy.play(client)
        (folder / "ready").touch()
        while not (folder / "go").exists():
            toy.play(client)
        after = run.status()
        say("found", state=after.state, same_process=after.started_at == before.started_at)
        changed = run.set({RATE: 8e-4})
        paused, pace = run.pause(), run.status().pace
        say("changed", set=changed, paused=paused, pace=pace, resumed=run.resume().pace)
        toy.play(client)
    run.stop()
    stopped = run.wait("stopped")
    say("stopped", step=step(stopped), log=list(run.logs(lines=10_000)))
    run.resume({STEPS: 500})
    resumed = run.wait("up")
    say("resumed", max_steps=resumed.policies["main"].max_steps, step=step(resumed))
    with SwarmClient(run.invite("laptop-again"), spool=folder / "spool") as client:
        toy.play(client)
        toy.learn(client)
        while step(run.status()) <= step(stopped):  # the learner may be behind the agents
            time.sleep(0.5)
    say("learned", rewards=toy.rewards, ended=len(toy.ended), step=step(run.status()))
    run.checkpoint()
    newest = max(Path(file.path).parts[:3] for file in run.files("main/checkpoints"))
    run.download("/".join(newest), folder / "trained")
    run.download("main/batches", folder / "batches")
    run.stop()
    say("ended", state=run.wait("stopped").state)


def step(view: Any) -> int:
    return view.policies["main"].step


def refusal(job: SwarmJob, host: HostClient) -> str | None:
    try:
        launch(job, host=host)
    except HostError as error:
        return error.param
    return "nothing"


def say(what: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
