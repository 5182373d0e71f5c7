"""A laptop that steers a run of another host, with nothing but the host's address and a token.

    laptop.py HOST MODEL FOLDER

The run's engine does not answer, so nothing is trained. Prints a JSON object for each thing that it has seen. In the middle it makes the file
`FOLDER/ready` and waits for `FOLDER/go`; the daemon is killed meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from swarmq import HostClient, SwarmClient, SwarmJob, launch
from swarmq.config import EngineSettings, Policy
from swarmq.errors import HostError

RATE, STEPS = "policies.main.train.learning_rate", "policies.main.train.max_steps"
NO_ENGINE = EngineSettings(urls=("http://127.0.0.1:1",))


def main(address: str, model: str, folder: Path) -> None:
    host = HostClient(address, patience_s=300.0)
    job = SwarmJob(run="math", policies={"main": Policy(model=model, engine=NO_ENGINE)})
    say("refused", param=refusal(SwarmJob(run="math", policies={"main": Policy(model="/nowhere/model")}), host))
    run = launch(job, host=host, request_id="first")
    again = launch(job, host=host, request_id="first")
    say("launched", same=again.name == run.name, taken=refusal(job, host), runs=len(host.runs()))
    before = run.wait("up")
    with SwarmClient(run.invite("laptop"), spool=folder / "spool"):
        say("joined")
    say("changed", set=run.set({RATE: 2e-6}), paused=run.pause(), pace=run.status().pace, resumed=run.resume().pace)
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
    after = run.status()
    say("found", state=after.state, same_process=after.started_at == before.started_at)
    run.stop()
    run.wait("stopped")
    say("stopped", last=list(run.logs())[-1])
    [copy] = run.download("logs/up.log", folder / "copy")
    say("downloaded", bytes=copy.stat().st_size)
    run.resume({STEPS: 7})
    say("resumed", max_steps=run.wait("up").policies["main"].max_steps)
    run.stop()
    run.wait("stopped")


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
